"""The sweep over tiles says how far what the product chooses is from the best, as its mode's chip chooses."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import standalone
import tune

HERE = ((9, 0), 132, 227 << 10)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The product's kernels, on an H200."""
    found: Any = standalone.load_kernel()
    monkeypatch.setattr(found, "get_device_info", lambda _: found.SparseMLADeviceInfo(*HERE))
    return found


@pytest.mark.parametrize(
    ("mode", "info"),
    [("native", HERE), ("sm120", ((12, 0), 132, 99 << 10)), ("sm80", ((8, 0), 132, 163 << 10))],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_mode_chooses_as_its_chip(kernels: Any, mode: str, info: Any, *, fp8: bool) -> None:
    found = tune.device_info_of(kernels, mode)
    assert tuple(found) == info
    torch = import_module("torch")
    assert tune.words_of(mode) == kernels.fp8_words_dtype(torch.uint8, found)
    for heads in tune.HEADS:
        tiles = set(tune.tiles_of(heads, mode, fp8=fp8))
        for tokens in tune.TOKENS:
            chosen = tune.select(kernels, heads, tokens, found, fp8=fp8)
            tile = tune.Tile(chosen.block_h, chosen.block_n, chosen.num_warps, chosen.num_stages)
            assert tile in tiles, (heads, tokens, tile)


def test_what_is_chosen_is_timed_once_after_all_others(kernels: Any) -> None:
    info = tune.device_info_of(kernels, "native")
    usable = set(tune.tiles_of(16, "native", fp8=True))
    for tokens in tune.TOKENS:
        chosen = tune.select(kernels, 16, tokens, info, fp8=True)
        found = tune.configs_of(kernels, usable, (16, tokens), chosen, "native", fp8=True)
        assert found[-1] == chosen
        assert len(set(found)) == len(found) > 10
        tile = tune.Tile(chosen.block_h, chosen.block_n, chosen.num_warps, chosen.num_stages)
        assert chosen not in tune.configs_of(
            kernels, usable - {tile}, (16, tokens), chosen, "native", fp8=True
        )


def test_the_chosen_configuration_is_compared_with_the_best_at_its_point() -> None:
    chosen = SimpleNamespace(_asdict=lambda: {"block_h": 16, "num_splits": 4})
    timings = [
        {"heads": 8, "tokens": 4, "us": 20.0, "block_h": 16, "num_splits": 2},
        {"heads": 8, "tokens": 4, "us": 30.0, "block_h": 16, "num_splits": 4},
        {"heads": 8, "tokens": 16, "us": 2.0, "block_h": 16, "num_splits": 4},
    ]
    point = {"heads": 8, "tokens": 4, "block_h": 16, "num_splits": 4}
    assert tune.choice(chosen, 8, 4, timings) == point | {"us": 30.0, "ratio": 1.5}
    assert tune.choice(chosen, 8, 4, timings[:1]) == point | {"us": None, "ratio": None}
    assert tune.choice(chosen, 8, 4, [])["ratio"] is None

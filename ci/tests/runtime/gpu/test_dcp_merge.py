"""Ranks do without CuteDSL only where the host's own Python packages cannot run it."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import dcp_merge
import pytest


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the variable back after each test."""
    monkeypatch.setenv(dcp_merge.WITHOUT_CUTEDSL, "x")
    monkeypatch.delenv(dcp_merge.WITHOUT_CUTEDSL)


def probe(program: str) -> dict[str, object]:
    found: dict[str, object] = dcp_merge.probe((sys.executable, "-c", program))
    return found


@pytest.mark.parametrize("of_packages", [True, False])
def test_only_an_error_of_the_packages_takes_cutedsl_away(of_packages: bool) -> None:
    said = json.dumps({"error": "ImportError: no quack", "of_packages": of_packages})
    assert probe(f"print('noise'); print({said!r})") == {
        "error": "ImportError: no quack",
        "without_cutedsl": of_packages,
    }
    assert (os.environ.get(dcp_merge.WITHOUT_CUTEDSL) == "ImportError: no quack") == of_packages


def test_a_kernel_that_works_is_left_alone() -> None:
    said = json.dumps({"error": None, "of_packages": False})
    assert probe(f"print({said!r})") == {"error": None, "without_cutedsl": False}
    assert dcp_merge.WITHOUT_CUTEDSL not in os.environ


def test_a_crash_and_a_hang_are_told_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = probe("import sys; sys.stderr.write('illegal address'); sys.exit(7)")
    assert crash == {"error": "exit status 7: illegal address", "without_cutedsl": False}
    monkeypatch.setattr(dcp_merge, "SECONDS", 1.0)
    assert probe("import time; time.sleep(60)")["error"] == "stopped after 1 s"
    assert dcp_merge.WITHOUT_CUTEDSL not in os.environ


@pytest.mark.parametrize(
    ("place", "expected"),
    [("cutlass/cute.py", True), ("quack/x.py", True), ("torch/cuda/x.py", False), ("vllm/quack/x.py", False)],
)
def test_errors_are_told_apart_by_where_they_come_from(place: str, expected: bool, tmp_path: Path) -> None:
    code = compile("raise RuntimeError('x')", str(tmp_path / place), "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(code)  # noqa: S102 - the only way to raise from a file of that name
    assert dcp_merge.is_of_packages(caught.value) == expected
    assert dcp_merge.is_of_packages(ModuleNotFoundError("quack"))


def test_a_host_without_a_device_or_packages_says_so() -> None:
    # The real script: without a GPU it cannot work, and says why in its last line.
    found = dcp_merge.probe()
    assert found["error"]


def test_a_rank_takes_the_merge_without_cutedsl_only_if_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers"
    indexer = SimpleNamespace(has_cutedsl_dcp_merge=lambda _: True)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(sparse_attn_indexer=indexer))
    dcp_merge.do_without()
    assert indexer.has_cutedsl_dcp_merge(512)
    monkeypatch.setenv(dcp_merge.WITHOUT_CUTEDSL, "ImportError")
    dcp_merge.do_without()
    assert not indexer.has_cutedsl_dcp_merge(512)


def test_vllm_has_what_is_tried_and_taken_away() -> None:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    vllm = Path(found.origin).parent / "model_executor"
    names = {
        "layers/sparse_attn_indexer.py": "def has_cutedsl_dcp_merge(topk_tokens: int) -> bool:",
        "kernels/attention/dsa/dcp_indexer_cutedsl.py": "def stable_topk_from_gathered_candidates_cutedsl(",
    }
    for file, line in names.items():
        assert line in (vllm / file).read_text()

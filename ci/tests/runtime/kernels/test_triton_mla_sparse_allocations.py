"""Launching the sparse-MLA kernels takes no memory, whatever the cache: they are given views of the caller's.

The patched tree's own test counts what a layer with a bf16 cache allocates; a copy of an fp8_ds_mla cache in
each call would be right, and show in the time alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelcheck.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RANK: Final = 512
WIDTH: Final = 256
HEADS: Final = 24
ROWS: Final = 100
WRAPPERS: Final = ("_SPLIT_KERNEL", "_FP8_SPLIT_KERNEL", "_MERGE_KERNEL")


class NewMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operators whose results lie in none of their arguments' memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator."""
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        self.operators += [str(func) for value in tensors if value.untyped_storage().data_ptr() not in given]
        return result


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the launches, which an interpreter would allocate for; return what each was given."""
    ops = import_module("vllm.v1.attention.ops.triton_mla_sparse")
    launches: list[dict[str, Any]] = []

    def note(_: Any, **arguments: Any) -> None:
        launches.append(arguments)

    for name in WRAPPERS:
        monkeypatch.setattr(type(getattr(ops, name)), "__call__", note)
    return launches


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("tokens", [2, 300])
def test_launching_takes_no_memory(
    use_chip: Callable[[Any], None],
    handed: list[dict[str, Any]],
    capability: int,
    rope: int,
    cache: torch.dtype,
    tokens: int,
) -> None:
    use_chip(CHIPS[capability])
    ops = import_module("vllm.v1.attention.ops.triton_mla_sparse")
    chip = ops.SparseMLADeviceInfo(divmod(capability, 10), 132, CHIPS[capability].shared_memory)
    row = 656 if cache == torch.uint8 else RANK + rope
    q = torch.zeros(tokens, HEADS, RANK + rope, dtype=torch.bfloat16)
    given = [
        q,
        torch.zeros(ROWS, row, dtype=cache),
        torch.zeros(tokens, WIDTH, dtype=torch.int32),
        torch.ones(tokens, dtype=torch.int32),
        torch.zeros(tokens, HEADS, RANK, dtype=torch.bfloat16),
        torch.zeros(tokens, HEADS),
    ]
    _, rows, topk, counts, out, lse = given
    sizes = ops.scratch_shapes(tokens, HEADS, WIDTH, RANK, chip, cache)
    scratch = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]

    with NewMemory() as taken:
        ops.triton_mla_sparse_fwd(
            q[..., :RANK], q[..., RANK:], rows, topk, counts, 0.1, out, lse, *scratch, device_info=chip
        )

    assert taken.operators == []
    assert len(handed) == 1 + (tokens == 2)  # split and merged, or at once
    memory = {tensor.untyped_storage().data_ptr() for tensor in (*given, *scratch)}
    tensors = [value for launch in handed for value in launch.values() if isinstance(value, torch.Tensor)]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= memory
    assert ("kv_words" in handed[0]) == (cache == torch.uint8)

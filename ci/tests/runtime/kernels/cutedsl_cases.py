"""Cases for what the two models launch in CuTeDSL from SM90 or SM100 on; see :mod:`forward_path`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from .forward_path_base import BF16, FP32, INT32, KPOOL_SIZE, TOKENS, TOPK, Queries, empty, fused_q, module
from .forward_path_dcp import BLOCK, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .forward_path_base import Case

QUERIES: Final = "queries"
MERGE: Final = "merge of the top-k"

# Heads of one rank change the grid only: the most and the least, tensor parallelism of 1 and of 8, stand for
# those between. DeepSeek-V3.2's angles are in float32 where FlashInfer is installed, else in bf16.
_FORMS: Final = {
    "DeepSeek-V3.2": (Queries(128, 64, rope=BF16), Queries(16, 64, rope=FP32)),
    "GLM-5": (Queries(64, 32, interleave=True, rope=BF16), Queries(8, 32, interleave=True, rope=BF16)),
    "shared top-k": (Queries(128, 0, rope=FP32), Queries(8, 0, rope=BF16)),
}


def merge(shard: Shard, width: int, *, prefill: bool) -> None:
    """Launch the packing of a rank's candidates and the selection among those of all."""
    indexer = module("vllm.model_executor.layers.sparse_attn_indexer")
    with patch.object(indexer, "get_dcp_group", lambda: shard):
        indexer._merge_dcp_topk_global(
            empty(TOKENS, 4096, kind=FP32),
            empty(TOKENS, width, kind=INT32),
            width,
            shard.rank,
            shard.size,
            shard.interleave,
            empty(TOKENS, kind=INT32) if prefill else None,
        )


def merges() -> Iterator[Case]:
    """Yield the merges of the top-k of DeepSeek-V3.2 and GLM-5, and of GLM-5.3-Flash's pools."""
    for width, block in ((TOPK, BLOCK), (TOPK // KPOOL_SIZE, BLOCK // KPOOL_SIZE)):
        for size in (2, 4):
            for prefill, run in ((True, 1), (False, block)):
                shard = Shard(size, size - 1, run)
                call = partial(merge, shard, width, prefill=prefill)
                yield f"{MERGE}, {width}, {shard}, prefill {prefill}", call


def queries() -> Iterator[Case]:
    """Yield the forms of DeepSeek-V3.2's and GLM-5's queries: bf16 and, for FlashInfer's kernels, fp8."""
    for model, forms in _FORMS.items():
        for form in forms:
            for quantized in (False, True):
                call = partial(fused_q, form, quantized=quantized)
                yield f"{QUERIES}, {model}, fp8 {quantized}, {form}", call


def every_launch() -> Iterator[Case]:
    """Yield all of it; the launchers choose between CuTeDSL and Triton by the chip."""
    yield from merges()
    yield from queries()

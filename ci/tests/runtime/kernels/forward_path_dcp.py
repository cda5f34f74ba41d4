"""The launches that decode context parallelism (DCP) changes or adds; see :mod:`forward_path`.

Size, rank and interleave are compile-time constants of most of these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import torch

from .forward_path_base import (
    BF16,
    FP32,
    INT32,
    INT64,
    KPOOL_SIZE,
    MLA,
    TOKENS,
    TOPK,
    compile_variant,
    empty,
    module,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .forward_path_base import Case

OPS: Final = "vllm.v1.attention.ops.dcp"
BLOCK: Final = 64
"""Tokens of a block of the cache."""
HEADS: Final = 16
"""Heads of one rank."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds of the cache."""

    size: int = 1
    rank: int = 0
    interleave: int = 1
    """Tokens that follow each other on a rank."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, interleave {self.interleave}"

    # The part of vLLM's group of ranks that the merges ask.

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.size

    @property
    def rank_in_group(self) -> int:
        """The rank."""
        return self.rank

    @property
    def device_group(self) -> None:
        """Nothing: no rank is there to exchange anything with."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what all ranks would give, all of them this one's."""
        return torch.cat([tensor] * self.size, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part."""
        return tensor.chunk(self.size, dim)[self.rank]


WHOLE: Final = Shard()
"""Without DCP."""
SHARDS: Final = (
    WHOLE,
    *(Shard(size, rank, run) for size in (2, 4) for rank in (0, size - 1) for run in (1, KPOOL_SIZE, BLOCK)),
)
POOLED: Final = tuple(each for each in SHARDS if each == WHOLE or each.interleave % KPOOL_SIZE == 0)
"""With pooled keys the interleave is a multiple of the pool."""


def prefill_metadata(shard: Shard, pool: int) -> None:
    """Compile the description of a prefill's chunks."""
    variant = module("vllm.model_executor.warmup.jit_warmup_triton_helper").TritonPointerInputVariant
    compile_variant(
        f"{MLA}.indexer",
        "_BUILD_PREFILL_CHUNK_METADATA_KERNEL",
        query_slice_start=0,
        query_slice_stop=TOKENS,
        DCP_RANK=shard.rank,
        DCP_WORLD=shard.size,
        DCP_INTERLEAVE=max(shard.interleave // pool, 1),
        BLOCK_SIZE=1024,
        COMPRESS_RATIO=pool,
        input_variant=variant.from_alignment(uncompressed_seq_lens=False, cu_compressed_seq_lens=False),
    )


def slot_mapping(shard: Shard) -> None:
    """Compile the map of tokens to cache slots."""
    compile_variant(
        "vllm.v1.worker.block_table",
        "_COMPUTE_SLOT_MAPPING_KERNEL",
        block_table_stride=33,
        kv_cache_block_size=BLOCK,
        total_cp_world_size=shard.size,
        total_cp_rank=shard.rank,
        cp_kv_cache_interleave_size=shard.interleave,
    )


def pool_slot_mapping(shard: Shard) -> None:
    """Launch the map of tokens to the slots of their pools."""
    module(f"{MLA}.compressor_utils").get_compressed_slot_mapping(
        TOKENS,
        empty(TOKENS, kind=INT64),
        empty(3, kind=INT32),
        empty(2, kind=INT32),
        empty(2, 33, kind=INT32),
        BLOCK // KPOOL_SIZE,
        KPOOL_SIZE,
        dcp_world_size=shard.size,
        cp_interleave=shard.interleave,
    )


def index_conversion(shard: Shard, width: int) -> None:
    """Launch the conversion of top-k entries to those rows of the cache that the rank holds."""
    module(f"{MLA}.sparse_utils").triton_filter_and_convert_dcp_index(
        empty(TOKENS, kind=INT32),
        empty(2, 33, kind=INT32),
        empty(TOKENS, width, kind=INT32),
        dcp_size=shard.size,
        dcp_rank=shard.rank,
        cp_kv_cache_interleave_size=shard.interleave,
        BLOCK_SIZE=BLOCK,
        NUM_TOPK_TOKENS=width,
        return_valid_counts=True,
    )


def _partial_results(size: int, kind: torch.dtype) -> dict[str, torch.Tensor]:
    heads = size * HEADS
    return {
        "cp_attn_out": empty(TOKENS, heads, 512, kind=kind),
        "cp_attn_lse": empty(TOKENS, heads, kind=FP32),
        "seq_lens": torch.tensor([7, 0], dtype=INT32),
        "query_start_loc": torch.tensor([0, 2, TOKENS], dtype=INT32),
    }


def merge_gathered(shard: Shard, kind: torch.dtype) -> None:
    """Launch the correction of a rank's result by the LSE of all."""
    module(OPS).cp_lse_ag_out_rs(**_partial_results(shard.size, kind), cp_group=shard)


def merge_exchanged(shard: Shard, kind: torch.dtype) -> None:
    """Launch the packing of results for the other ranks, and the merge of theirs."""
    with patch("torch.distributed.all_to_all_single"):
        module(OPS).dcp_a2a_lse_reduce(**_partial_results(shard.size, kind), cp_group=shard)


def every_launch() -> Iterator[Case]:
    """Yield the launches without DCP and with DCP of 2 and 4."""
    for shard in SHARDS:
        yield f"metadata of prefills, {shard}", partial(prefill_metadata, shard, 1)
        yield f"slot mapping, {shard}", partial(slot_mapping, shard)
        yield f"index conversion, {shard}", partial(index_conversion, shard, TOPK)
    for shard in POOLED:
        yield f"metadata of prefills, pools, {shard}", partial(prefill_metadata, shard, KPOOL_SIZE)
        yield f"slot mapping of pools, {shard}", partial(pool_slot_mapping, shard)
        yield f"index conversion, pools, {shard}", partial(index_conversion, shard, 2176)
    for size in (2, 4):
        for rank in (0, size - 1):
            shard = Shard(size, rank)
            for kind in (BF16, torch.float16):
                yield f"merge of DCP, {kind}, {shard}", partial(merge_gathered, shard, kind)
                yield f"all-to-all merge of DCP, {kind}, {shard}", partial(merge_exchanged, shard, kind)

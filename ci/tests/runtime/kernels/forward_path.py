"""Cases for ahead-of-time compilation of what the two models' forward path launches.

Each case calls a launcher of the product with the shapes of DeepSeek-V3.2, GLM-5 or GLM-5.3-Flash on
small CPU tensors, because some launchers read values; nothing is ever launched. Kernels with figures of
their own (sparse MLA, MQA logits) are not repeated here.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import triton

from kernelcheck.chips import CHIPS

from . import forward_path_dcp as dcp
from . import forward_path_glm as glm
from .forward_path_base import (
    BF16,
    BYTE,
    CHEAPEST_CHIP,
    EPS,
    FP32,
    GLM,
    INT32,
    INT64,
    MLA,
    TOKENS,
    TOPK,
    V32,
    Queries,
    by_key_scales,
    compile_variant,
    empty,
    fused_q,
    module,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .forward_path_base import Case

# DeepSeek-V3.2 and GLM-5


def norm_rope(cache: str, *, indexer: bool, interleave: bool) -> None:
    """Launch the fused norms, RoPE and cache writes of one layer."""
    caches = {
        "auto": empty(4, 64, 576),
        "fp8": empty(4, 64, 576, kind=BYTE),
        "fp8_ds_mla": empty(4, 64, 656, kind=BYTE),
    }
    angles = empty(4096, 64, kind=FP32)
    module(V32).fused_norm_rope(
        empty(TOKENS, kind=INT64),
        empty(TOKENS, 2112)[:, :1536],
        empty(1536),
        EPS,
        empty(TOKENS, 2112)[:, 1536:2048],
        empty(512),
        EPS,
        empty(TOKENS, 2112)[:, 2048:],
        angles,
        empty(TOKENS, 192)[:, :128] if indexer else None,
        empty(128, kind=FP32) if indexer else None,
        empty(128, kind=FP32) if indexer else None,
        EPS,
        angles if indexer else None,
        empty(TOKENS, TOPK, kind=INT32),
        slot_mapping=empty(TOKENS, kind=INT64),
        indexer_slot_mapping=empty(TOKENS, kind=INT64) if indexer else None,
        indexer_k_cache=empty(4, 64, 132, kind=BYTE) if indexer else None,
        mla_kv_cache=caches[cache],
        mla_kv_cache_dtype=cache,
        mla_k_scale=empty(1, kind=FP32),
        has_indexer=indexer,
        index_rope_interleave=interleave,
        kv_c_out=empty(TOKENS, 512),
        k_pe_out=empty(TOKENS, 64),
    )


def queries(form: Queries, *, quantized: bool) -> None:
    """Launch the fused RoPE and quantization of both queries in Triton, as without the CuTeDSL package."""
    with patch.object(module(V32), "has_cutedsl", lambda: False):
        fused_q(form, quantized=quantized)


def embed_norm() -> None:
    """Launch the gather of embeddings with the first norm, and its counterpart for a draft."""
    ops = module("vllm.model_executor.layers.fused_embed_norm")
    ids, table, weight = empty(TOKENS, kind=INT64), empty(512, 7168), empty(7168)
    ops.fused_embed_norm(ids, table, weight, EPS)
    ops.fused_embed_eh_norm(ids, ids, table, empty(TOKENS, 7168), weight, weight, EPS)


def eh_norm(name: str, hidden: int) -> None:
    """Launch the two norms in front of a draft layer."""
    hiddens, weight = empty(TOKENS, hidden), empty(hidden)
    module(name).fused_eh_norm(empty(TOKENS, kind=INT64), hiddens, empty(TOKENS, hidden), weight, weight, EPS)


# Both models: metadata, packing, experts


def decode_metadata() -> None:
    """Launch what the indexer's builder launches for decodes of several tokens."""
    starts, lengths, rows = empty(4, kind=INT32), empty(8, kind=INT32), empty(8, 33, kind=INT32)
    ops = module("vllm.v1.attention.ops.metadata")
    ops.compute_token_to_req_indices(starts, lengths, TOKENS, 8)
    compile_variant(
        f"{MLA}.indexer",
        "_PREPARE_UNIFORM_DECODE_KERNEL",
        block_size=1024,
        block_table_stride=33,
        expanded_bt_stride=33,
        max_decode_len=2,
    )
    ops._indexer_decode_metadata_kernel[(8,)](
        *(starts, lengths, rows, lengths, rows, lengths, lengths, lengths),
        *(3, TOKENS, 8, rows.stride(0), rows.stride(0)),
        BLOCK_COLS=33,
        num_warps=4,
    )


def packing() -> None:
    """Compile what aligns decodes of different lengths: queries, their weights and the top-k."""
    ops = module("vllm.v1.attention.ops.common")
    for kind, padding in ((torch.float8_e4m3fn, -float("inf")), (FP32, 0)):
        for key in ops._PACK_SEQ_TRITON_KERNEL.get_warmup_keys(dtype=kind, pad_value=padding):
            ops._PACK_SEQ_TRITON_KERNEL.compile(key)
    for key in ops._UNPACK_SEQ_TRITON_KERNEL.get_warmup_keys():
        ops._UNPACK_SEQ_TRITON_KERNEL.compile(key)


def masked_prefill() -> None:
    """Launch the mask of top-k entries that a short prefill attends with."""
    ops = module("vllm.model_executor.layers.attention.sparse_mla_attention")
    mask = torch.empty(2, 4, 128, dtype=INT32)
    rows = torch.empty(4, TOPK, dtype=INT32)
    ops._build_topk_mask([rows], [4], 4, 4096, mask)
    ops._scatter_topk_kernel[(8,)](
        *(mask, torch.empty(8, TOPK, dtype=INT32), torch.empty(3, dtype=INT32)),
        num_words=128,
        mask_row_stride=128,
        num_topk=TOPK,
        topk_stride=TOPK,
        max_q_len=4,
        BLOCK_TOPK=TOPK,
        BLOCK_WORDS=128,
    )


def experts() -> None:
    """Launch the experts' matrix product in bf16 with its default tile, and the sum over experts."""
    ops = module("vllm.model_executor.layers.fused_moe.fused_moe")
    count, hidden, inner, chosen = 8, 1024, 512, 4
    for tokens in (TOKENS, 1024):
        config = ops.get_default_config(tokens, count, inner, hidden, chosen, None)
        block = config["BLOCK_SIZE_M"]
        ops.invoke_fused_moe_triton_kernel(
            torch.empty(tokens, hidden, dtype=BF16),
            torch.empty(count, 2 * inner, hidden, dtype=BF16),
            torch.empty(tokens, chosen, 2 * inner, dtype=BF16),
            None,
            None,
            torch.empty(tokens, chosen),
            torch.empty(tokens * chosen + count * block, dtype=INT32),
            torch.empty(tokens * chosen + count, dtype=INT32),
            torch.empty(1, dtype=INT32),
            mul_routed_weight=False,
            top_k=chosen,
            config=config,
            compute_type=triton.language.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
    ids = torch.empty(TOKENS, chosen, dtype=INT32)
    places = torch.empty(16, dtype=INT32)
    outputs = torch.empty(TOKENS, chosen, hidden, dtype=BF16)
    sums = module("vllm.model_executor.layers.fused_moe.moe_fused_mul_sum")
    sums.moe_fused_mul_sum(outputs, torch.empty(TOKENS, chosen), topk_ids=ids, expert_map=places)
    helpers = module("vllm.model_executor.layers.fused_moe.utils")
    helpers.count_expert_num_tokens(ids, count, places)
    helpers.remap_topk_to_local(ids, places)
    helpers._swiglu_limit_pad_aware(outputs[:, 0], torch.empty(TOKENS, 2 * hidden, dtype=BF16), ids, 7.0)


def merge() -> None:
    """Launch the merge of a prefill's parts, where the native one does not take the shape."""
    ops = module("vllm.v1.attention.ops.triton_merge_attn_states")
    parts = [torch.empty(TOKENS, 8, 192, dtype=BF16) for _ in range(3)]
    sums = [torch.empty(8, TOKENS) for _ in range(2)]
    ops.merge_attn_states(parts[0], parts[1], sums[0], parts[2], sums[1])


def patched() -> Iterator[Case]:
    """Yield the launches of kernels that our patches change."""
    for cache in ("auto", "fp8", "fp8_ds_mla"):
        for interleave in (True, False):
            call = partial(norm_rope, cache, indexer=True, interleave=interleave)
            yield from by_key_scales(f"norm and rope, {cache} cache, interleaved {interleave}", call)
    yield "norm and rope, shared layer", partial(norm_rope, "auto", indexer=False, interleave=False)
    for quantized in (False, True):
        for interleave in (True, False):
            call = partial(queries, Queries(interleave=interleave), quantized=quantized)
            yield f"queries, fp8 {quantized}, interleaved {interleave}", call
    yield "queries, shared layer", partial(queries, Queries(index_heads=0), quantized=False)
    yield "packing", packing
    yield "rotated queries", glm.rotated_queries
    yield from by_key_scales("pooled keys", glm.pooled_keys)


def every_launch() -> Iterator[Case]:
    """Yield a launch of every kernel on the forward path of the two models."""
    yield from patched()
    yield "embedding and norm", embed_norm
    yield "draft norms, DeepSeek-V3.2", partial(eh_norm, V32, 7168)
    yield "draft norms, GLM-5.3-Flash", partial(eh_norm, f"{GLM}.nvidia.ops.fused_eh_norm", 4096)
    yield "metadata of decodes", decode_metadata
    yield from dcp.every_launch()
    yield "masked prefill", masked_prefill
    yield "experts", experts
    yield "latent norms", glm.latent_norms
    yield "convolution", glm.convolution
    yield "recurrent states", glm.recurrent_states
    for drafts in (False, True):
        yield f"delta attention, drafts {drafts}", partial(glm.delta_attention_decode, drafts=drafts)
    yield "delta attention, prefill", glm.delta_attention_prefill
    yield "pixels", glm.pixels
    yield "merge of attention", merge
    yield "vision RoPE", glm.vision_rope


def launched() -> set[str]:
    """Return ``module:name`` of every kernel that the cases launch on the pretended chip."""
    from kernelcheck import aot  # noqa: PLC0415 - loads Triton, which comes after pretend()

    functions = [
        launch.kernel.fn for _, call in every_launch() for launch in aot.record(CHIPS[CHEAPEST_CHIP], call)
    ]
    return {f"{function.__module__}:{function.__qualname__}" for function in functions}


def main() -> int:
    """Print the names of all launched kernels, one a line."""
    from kernelcheck import platform  # noqa: PLC0415 - a compiling process only

    platform.pretend(CHIPS[CHEAPEST_CHIP])
    sys.stdout.write("\n".join(sorted(launched())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

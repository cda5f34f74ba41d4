"""The launches of GLM-5.3-Flash that DeepSeek-V3.2 does not share; see :mod:`forward_path`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Final
from unittest.mock import patch

import torch

from .forward_path_base import (
    BF16,
    BYTE,
    EPS,
    FP32,
    GLM,
    INT32,
    INT64,
    KPOOL,
    KPOOL_SIZE,
    MLA,
    TOKENS,
    TOPK,
    cheapest_configuration,
    compile_variant,
    empty,
    module,
)

HEADS: Final = 8
"""Heads of one rank."""
CHANNELS: Final = 3 * HEADS * 128


def rotated_queries() -> None:
    """Launch the rotation and quantization of the indexer's queries."""
    module(KPOOL).fwht128_quant_fp8(torch.empty(TOKENS * 16, 128, dtype=BF16))


def pooled_keys() -> None:
    """Launch both writers of pooled keys, and what keeps and reads the last pool."""
    ops = module(KPOOL)
    cache = torch.empty(4, 64, 132, dtype=BYTE)
    tail = torch.empty(4, 2, 8, 128, dtype=BF16)
    keys = torch.empty(TOKENS, KPOOL_SIZE, 128, dtype=BF16)
    ape = torch.empty(KPOOL_SIZE, 128)
    slots = torch.empty(TOKENS, dtype=INT64)
    chosen = torch.empty(TOKENS, dtype=torch.bool)
    ops.kpool_compress_and_write_cache(cache, keys, keys, ape, slots, KPOOL_SIZE, write_mask=chosen)
    rows = torch.empty(TOKENS, 128, dtype=BF16)
    ops.kpool_seed_tail_cache(tail, rows, rows, slots.int(), KPOOL_SIZE)
    places = torch.empty(TOKENS, KPOOL_SIZE, dtype=INT32)
    ops.kpool_decode_update_and_maybe_write_cache_batched(
        cache, tail, places, keys, keys, ape, places, places, KPOOL_SIZE
    )
    pools = torch.empty(TOKENS, TOPK // KPOOL_SIZE, dtype=INT64)
    ops.expand_pools_and_append_tail(pools, slots.int(), KPOOL_SIZE)
    module(f"{MLA}.indexer").compute_kpool_tail_slot_mapping(
        empty(TOKENS, kind=INT64),
        empty(2, 33, kind=INT32),
        empty(3, kind=INT32),
        empty(TOKENS, kind=INT64),
        TOKENS,
        2,
        KPOOL_SIZE,
    )


def latent_norms() -> None:
    """Compile the fused norms of query and latent."""
    compile_variant(
        "vllm.models.common.ops.fused_qk_rmsnorm",
        "_FUSED_Q_KV_RMSNORM_KERNEL",
        dtype=BF16,
        q_size=1536,
        kv_size=512,
        eps=EPS,
        launch_pdl=False,
        q_in_stride=2048,
        q_out_stride=1536,
        kv_in_stride=2048,
        kv_out_stride=512,
    )


def convolution() -> None:
    """Launch the short convolution of a prefill and of a decode, with and without drafts."""
    ops = module("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    states = torch.empty(4, CHANNELS, 3, dtype=BF16).transpose(1, 2).contiguous().transpose(1, 2)
    weight = torch.empty(CHANNELS, 4)
    starts, places = torch.tensor([0, 2, TOKENS], dtype=INT32), torch.zeros(2, dtype=INT32)
    projected = torch.empty(TOKENS, CHANNELS + 264, dtype=BF16)[:, :CHANNELS]
    ops.causal_conv1d_fn(
        projected.transpose(0, 1),
        weight,
        None,
        conv_states=states,
        query_start_loc=starts,
        cache_indices=places,
        has_initial_state=torch.zeros(2, dtype=torch.bool),
    )
    update = partial(ops.causal_conv1d_update, activation="silu", conv_state_indices=places)
    update(projected[:2], states, weight)
    update(
        projected,
        torch.empty(4, 5, CHANNELS, dtype=BF16).transpose(1, 2),
        weight,
        num_accepted_tokens=places + 1,
        query_start_loc=starts,
        max_query_len=3,
    )


def recurrent_states() -> None:
    """Launch what moves recurrent states in and out of the cache, and finds their blocks."""
    ops = "vllm.model_executor.layers.mamba.ops"
    states, places = empty(4, HEADS, 128, 128, kind=FP32), empty(2, kind=INT32)
    rows = module(f"{ops}.gather_initial_states").gather_initial_states(
        states, places, empty(2, kind=torch.bool)
    )
    module(f"{ops}.scatter_states").scatter_states(states, rows, places)
    module("vllm.v1.attention.backends.utils")._mamba_align_block_table_kernel[(2,)](
        *(places, empty(2, 33, kind=INT32), 33, 1, places, 1, 128, 4),
        BLOCK=4,
    )


def delta_attention_decode(*, drafts: bool) -> None:
    """Launch the recurrent delta attention with its gate, for one token or for drafts."""
    kda = module(f"{GLM}.nvidia.ops.third_party.kda")
    shape = (1, TOKENS, HEADS, 128)
    q, k, v = (torch.empty(shape, dtype=BF16) for _ in range(3))
    places = torch.zeros(2, 4, dtype=INT32) if drafts else torch.zeros(TOKENS, dtype=INT32)
    starts = torch.tensor([0, 2, TOKENS] if drafts else range(TOKENS + 1), dtype=INT32)
    kda.fused_recurrent_kda(
        q=q,
        k=k,
        v=v,
        g=torch.empty(shape, dtype=BF16),
        beta=torch.empty(1, TOKENS, HEADS, dtype=BF16),
        initial_state=torch.empty(4, HEADS, 128, 128),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts,
        ssm_state_indices=places,
        num_accepted_tokens=torch.ones(2, dtype=INT32) if drafts else None,
        sigmoid_beta=True,
        a_log=torch.empty(1, 1, HEADS, 1),
        g_bias=torch.empty(HEADS * 128),
        compute_gate=True,
        lower_bound=-5.0,
    )


def delta_attention_prefill() -> None:
    """Launch the chunked delta attention that serves where FlashKDA does not, and the gated norm."""
    kda = module(f"{GLM}.nvidia.ops.third_party.kda")
    module("vllm.utils.torch_utils").PIN_MEMORY = False  # only a driver can pin
    tokens = 130
    shape = (1, tokens, HEADS, 128)
    q, k, v, gate = (torch.empty(shape, dtype=BF16) for _ in range(4))
    with cheapest_configuration():
        kda.chunk_kda_with_fused_gate(
            q=q,
            k=k,
            v=v,
            raw_g=gate,
            beta=torch.empty(1, tokens, HEADS),
            A_log=torch.empty(1, 1, HEADS, 1),
            g_bias=torch.empty(HEADS * 128),
            initial_state=torch.empty(2, HEADS, 128, 128),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor([0, 60, tokens], dtype=INT32),
            safe_gate=True,
            lower_bound=-5.0,
        )
        module("vllm.third_party.flash_linear_attention.ops.kda").rms_norm_gated(
            q, gate[0], torch.empty(128, dtype=BF16), None, "sigmoid"
        )


def pixels() -> None:
    """Launch the normalization of an image on the device."""
    norm = module("vllm.model_executor.layers.fusion.mm_input_norm")
    image = torch.empty(TOKENS, 3, 196, dtype=BYTE)
    norm.fused_mm_input_norm_triton(
        image, torch.empty(TOKENS, 3, 196, dtype=BF16), torch.empty(3), torch.empty(3)
    )


def vision_rope() -> None:
    """Launch the rotation of queries and keys in the vision tower."""
    rotary = module("vllm.vllm_flash_attn.ops.triton.rotary")
    angles = torch.empty(TOKENS, 32, dtype=BF16)
    with patch("torch.cuda.device", nullcontext):  # there is none to switch to
        rotary.apply_rotary(empty(1, TOKENS, 2 * HEADS, 64), angles, angles)

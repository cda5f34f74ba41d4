"""Where the Triton kernels are that the two models could launch, and why some are not launched.

A module or kernel that is in none of these tables has to be launched by a case of
:mod:`forward_path`; the test fails otherwise, so that a new upstream kernel is not overlooked.
"""

from __future__ import annotations

from typing import Final

SEEDS: Final = (
    "vllm.models.deepseek_v32.nvidia.model",
    "vllm.models.deepseek_v32.nvidia.mtp",
    "vllm.models.glm5next.common.model",
    "vllm.models.glm5next.common.mtp",
    "vllm.v1.attention.backends.gdn_attn",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.triton_mla_sparse",
)
"""The models with their drafts, and what builds and runs their attention."""

DEEP: Final = (
    "vllm.model_executor.layers.sparse_attn_indexer",
    "vllm.models.common.",
    "vllm.models.deepseek_v32.",
    "vllm.models.glm5next.",
    "vllm.utils.deep_gemm",
    "vllm.v1.attention.backends.mla.",
    "vllm.v1.attention.ops.",
)
"""Modules that import what they launch inside functions."""

_LAYERS: Final = "vllm.model_executor.layers"
_OPS: Final = "vllm.v1.attention.ops"
_FLA: Final = "vllm.third_party.flash_linear_attention.ops"
_KDA: Final = "vllm.models.glm5next.nvidia.ops.third_party.kda"

ELSEWHERE: Final = (f"{_OPS}.triton_mla_sparse", f"{_OPS}.triton_mqa_logits")
"""Modules whose kernels have figures of their own, for every chip."""

_REASONS: Final = {
    "AMD GPUs": (
        "vllm.model_executor.kernels.linear.mixed_precision.rdna_hybrid_w4a16",
        "vllm.model_executor.kernels.linear.mxfp8.rocm_block32_gemm",
        "vllm.model_executor.kernels.linear.mxfp8.rocm_native",
        "vllm.models.glm5next.amd.ops.kpool_compress",
        "vllm.models.glm5next.amd.ops.third_party.kda.fused_recurrent",
        "vllm.models.glm5next.amd.ops.third_party.kda.kernels",
        f"{_OPS}.rocm_aiter_mla_sparse",
    ),
    "Intel GPUs": ("vllm._xpu_ops",),
    "another model": (
        "vllm.kernels.triton.activation",
        "vllm.model_executor.kernels.attention.dsa.candidate_blocks",
        "vllm.model_executor.kernels.attention.dsa.sparse_mqa_logits",
        "vllm.model_executor.kernels.mhc.triton",
        f"{_LAYERS}.activation",
        f"{_LAYERS}.fused_moe.router.dsv4_topk",
        f"{_LAYERS}.rotary_embedding.bailing_mrope",
        f"{_LAYERS}.rotary_embedding.mrope",
        f"{_FLA}.fused_recurrent",
    ),
    "another attention backend": (
        f"{_OPS}.int4_per_token_head",
        f"{_OPS}.triton_prefill_attention",
        f"{_OPS}.triton_reshape_and_cache_flash",
        f"{_OPS}.triton_unified_attention",
    ),
    "packs for CuTeDSL's merge of the ranks' top-k, SM90 and later; below PyTorch merges": (
        "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl",
    ),
    "batch invariance, which TRITON_MLA_SPARSE refuses": ("vllm.model_executor.determinism.batch_invariant",),
    "experts through DeepGEMM or DeepEP, or balanced": (
        f"{_LAYERS}.fused_moe.deep_gemm_utils",
        f"{_LAYERS}.fused_moe.experts.batched_deep_gemm_moe",
        f"{_LAYERS}.fused_moe.experts.fused_batched_moe",
        f"{_LAYERS}.fused_moe.prepare_finalize.deepep_v2",
        f"{_LAYERS}.fused_moe.router.base_router",
    ),
    "FlashKDA, SM90 and later": (f"{_LAYERS}.mamba.checkpoint",),
    "quantized activations or weights; below SM89 Marlin takes fp8 and 4-bit weights": (
        "vllm.kernels.triton.qkv_padded_fp8_quant",
        "vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16",
        f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors_embedding",
        f"{_LAYERS}.quantization.compressed_tensors.triton_scaled_mm",
        f"{_LAYERS}.quantization.utils.fp8_utils",
        f"{_LAYERS}.quantization.utils.int8_utils",
        f"{_LAYERS}.quantization.utils.mxfp4_utils",
        f"{_LAYERS}.quantization.utils.mxfp8_utils",
        f"{_LAYERS}.quantization.utils.nvfp4_emulation_utils",
    ),
}

OFF_PATH: Final = {module: reason for reason, modules in _REASONS.items() for module in modules}
"""Modules none of whose kernels the two models launch on an NVIDIA GPU, with the reason."""

NOT_LAUNCHED: Final = {
    f"{_LAYERS}.fused_moe.fused_moe:compute_identity_kernel": "experts that do nothing",
    f"{_LAYERS}.fused_moe.fused_moe:fused_moe_kernel_gptq_awq": "4-bit weights",
    f"{_LAYERS}.sparse_attn_indexer:_fused_indexer_q_rope_quant_kernel": "DeepSeek-V2's own layers",
    f"{_LAYERS}.sparse_attn_indexer:_upcast_logits_kernel": "DeepGEMM's bf16 logits of SM100",
    "vllm.v1.attention.backends.mla.sparse_utils:sparse_mla_prepare_safe_lengths_kernel": "FlashInfer",
    f"{_KDA}.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode_kernel": "scalar gates",
    f"{_KDA}.kernels:kda_gate_fwd_kernel": "the gate is fused",
    f"{_FLA}.cumsum:chunk_local_cumsum_scalar_kernel": "the sum is fused with the gate",
    f"{_FLA}.cumsum:chunk_local_cumsum_vector_kernel": "the sum is fused with the gate",
    f"{_FLA}.kda:chunk_gla_fwd_kernel_o": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_inter": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_intra": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:kda_gate_cumsum_fwd_kernel": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:kda_gate_fwd_kernel": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:recompute_w_u_fwd_kernel": "GLM-5.3-Flash has a copy",
    f"{_FLA}.kda:layer_norm_gated_fwd_kernel1": "rows above 512",
    f"{_FLA}.op:gather": "for a Triton without tl.gather",
    f"{_FLA}.l2norm:l2norm_fwd_kernel": "USE_DEFAULT_FLA_NORM",
    f"{_FLA}.l2norm:l2norm_fwd_kernel1": "USE_DEFAULT_FLA_NORM",
    f"{_FLA}.solve_tril:merge_16x16_to_32x32_inverse_kernel": "chunks of 32",
    f"{_FLA}.solve_tril:solve_tril_16x16_kernel": "chunks of 16",
}
"""Kernels of other modules that the two models do not launch, with the reason."""

"""Our backend asked for by name, by kind of cache and with a block size, and the errors it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.selection.flashinfer_states import FlashInfer

if TYPE_CHECKING:
    from tests.selection.conftest import Ask

OURS: Final = "TRITON_MLA_SPARSE"
SERVED: Final = (80, 86, 89, 90, 100, 103, 110, 120, 121)
BY_NAME: Final = {"backend": OURS}
BY_KIND: Final = {"backend": "FLASHMLA_SPARSE", "backend_per_kind": {"mla_attention": OURS}}


@pytest.mark.parametrize("capability", SERVED)
@pytest.mark.parametrize("state", [FlashInfer.USABLE])
def test_asked_for_it_serves_all_that_it_claims(ask: Ask) -> None:
    requests = [
        how | {"head_size": head_size, "num_heads": heads} | rest
        for how in (BY_NAME, BY_KIND)
        for head_size in (576, 512)
        for heads in (1, 8, 128)
        for rest in (
            {"kv_cache_dtype": "auto"},
            {"kv_cache_dtype": "bfloat16"},
            {"kv_cache_dtype": "auto", "dtype": "float16"},
            {"kv_cache_dtype": "float16", "dtype": "float16"},
            {"kv_cache_dtype": "fp8"},
            {"kv_cache_dtype": "fp8_e4m3"},
            {"kv_cache_dtype": "fp8_ds_mla", "block_size": 128},
            {"block_size": 64},
            {"block_size": 128},
            {"block_size": 256},
            {"index_topk": 512},
            {"decode_context_parallel_size": 2},
            {"decode_context_parallel_size": 8, "index_topk": 1152},
        )
    ]
    answers = ask(requests)
    assert [answer["backend"] for answer in answers] == [OURS] * len(requests)


REFUSALS: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"kv_cache_dtype": "fp8_e5m2"},
        "does not read the fp8_e5m2 KV cache; use --kv-cache-dtype fp8 or bfloat16",
    ),
    ({"kv_cache_dtype": "nvfp4_ds_mla"}, "does not read the nvfp4_ds_mla KV cache"),
    ({"kv_cache_dtype": "fp8", "dtype": "float16"}, "with bfloat16 activations only, got torch.float16"),
    ({"kv_cache_dtype": "float16"}, "not fp8 in the model's dtype: got a float16 cache"),
    ({"prefill_context_parallel_size": 2}, "'PCP not supported'"),
    ({"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}, "'PCP not supported'"),
    ({"batch_invariant": True}, "'batch invariance not supported'"),
    ({"hisparse": True}, "TRITON_MLA_SPARSE does not serve HiSparse"),
    ({"block_size": 32}, "'block_size not supported'"),
    ({"block_size": 96}, "'block_size not supported'"),
    ({"index_topk": 2000}, "requires index_topk % 128 == 0, got 2000"),
    ({"dtype": "float32"}, "'dtype not supported'"),
]


@pytest.mark.parametrize("capability", SERVED)
@pytest.mark.parametrize("state", [FlashInfer.USABLE])
def test_refused_by_name_with_the_reason(ask: Ask) -> None:
    answers = ask([BY_NAME | request for request, _ in REFUSALS])
    for answer, (request, reason) in zip(answers, REFUSALS, strict=True):
        start = "Selected backend AttentionBackendEnum.TRITON_MLA_SPARSE is not valid"
        assert answer["backend"] is None, request
        assert answer["error"].startswith(start)
        assert reason in answer["error"]


@pytest.mark.parametrize(
    ("capability", "state", "selected"),
    [
        (80, FlashInfer.ABSENT, OURS),
        (90, FlashInfer.ABSENT, "FLASH_ATTN_MLA_SPARSE"),
        (120, FlashInfer.USABLE, "FLASHINFER_MLA_SPARSE_SM120"),
        (120, FlashInfer.UNUSABLE, OURS),
    ],
)
def test_block_size_moves_nothing_to_ours_that_a_native_backend_takes(ask: Ask, selected: str) -> None:
    answers = ask([{"block_size": block_size} for block_size in (64, 128, 256)])
    assert [answer["backend"] for answer in answers] == [selected] * 3


@pytest.mark.parametrize("capability", [86, 121])
@pytest.mark.parametrize("state", list(FlashInfer))
def test_pooled_indexer_may_have_any_topk(ask: Ask) -> None:
    """GLM-5.3-Flash rounds its buffer up to a multiple of 128 itself."""
    (answer,) = ask([{"head_size": 512, "index_topk": 2000}])
    assert answer["backend"] == OURS

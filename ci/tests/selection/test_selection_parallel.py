"""What vLLM selects for sparse MLA under decode (DCP) and prefill (PCP) context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.selection.flashinfer_states import FlashInfer

if TYPE_CHECKING:
    from tests.selection.conftest import Ask

OURS: Final = "TRITON_MLA_SPARSE"
FLASH_MLA: Final = "FLASHMLA_SPARSE"
FI_SM100: Final = "FLASHINFER_MLA_SPARSE"
REFUSED: Final = None

DCP: Final[dict[str, Any]] = {"decode_context_parallel_size": 2, "num_heads": 8}
MANY_HEADS: Final[dict[str, Any]] = DCP | {"num_heads": 64}
Row = tuple[dict[str, Any], str | None]

EVERY_CACHE: Final[list[Row]] = [
    (how | {"head_size": head_size, "kv_cache_dtype": cache}, OURS)
    for how in (DCP, MANY_HEADS)
    for head_size in (576, 512)
    for cache in ("auto", "bfloat16")
]
# FLASHMLA_SPARSE used to be selected for the bf16 cache, and raised while it was built.
SM90: Final[list[Row]] = [
    *EVERY_CACHE,
    (DCP | {"kv_cache_dtype": "fp8_ds_mla"}, FLASH_MLA),
    (DCP | {"kv_cache_dtype": "fp8"}, FLASH_MLA),
    (MANY_HEADS | {"kv_cache_dtype": "fp8_ds_mla"}, OURS),
]
SM12X: Final[list[Row]] = [
    *EVERY_CACHE,
    *((DCP | {"head_size": size, "kv_cache_dtype": "fp8_ds_mla"}, OURS) for size in (576, 512)),
]
SM10X: Final[list[Row]] = [
    (how | {"head_size": head_size, "kv_cache_dtype": cache}, FI_SM100)
    for how in (MANY_HEADS, DCP | {"num_heads": 17})
    for head_size in (576, 512)
    for cache in ("auto", "bfloat16", "fp8")
]
TABLES: Final = {80: EVERY_CACHE, 89: EVERY_CACHE, 90: SM90, 100: SM10X, 110: EVERY_CACHE, 120: SM12X}


@pytest.mark.parametrize("capability", TABLES)
@pytest.mark.parametrize("state", [FlashInfer.USABLE, FlashInfer.ABSENT])
def test_dcp(ask: Ask, capability: int) -> None:
    """No native backend of SM90 serves a bf16 cache with DCP, the one of SM120 serves no DCP at all."""
    rows = TABLES[capability]
    answers = ask([request for request, _ in rows])
    selected = [(request, answer["backend"]) for (request, _), answer in zip(rows, answers, strict=True)]
    assert selected == rows


@pytest.mark.parametrize("capability", [80, 89, 110, 120])
@pytest.mark.parametrize("state", [FlashInfer.ABSENT])
def test_pcp_is_refused_with_the_reason(ask: Ask) -> None:
    pcp = {"prefill_context_parallel_size": 2, "kv_cache_dtype": "bfloat16"}
    answers = ask([pcp, pcp | {"decode_context_parallel_size": 2}])
    for answer in answers:
        assert answer["backend"] is REFUSED
        assert "PCP not supported" in answer["error"].partition(f"{OURS}: [")[2].partition("]")[0]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("state", [FlashInfer.USABLE])
def test_no_sparse_backend_is_batch_invariant(ask: Ask) -> None:
    """Theirs neither: the top-k of the indexer is not."""
    (answer,) = ask([{"batch_invariant": True, "kv_cache_dtype": "bfloat16"}])
    assert answer["backend"] is REFUSED
    assert "batch invariance not supported" in answer["error"].partition(f"{OURS}: [")[2]

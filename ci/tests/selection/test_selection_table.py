"""What vLLM selects for sparse MLA, on every chip and in every state of FlashInfer.

The expected values are the table "What selection must give" and, where it leaves a cell open, what
follows from the gates of upstream's backends. ``REFUSED`` marks what no backend takes: the request is
refused while the backend is selected, and the error names our reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.selection.flashinfer_states import FlashInfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.selection.conftest import Ask

OURS: Final = "TRITON_MLA_SPARSE"
FLASH_ATTN: Final = "FLASH_ATTN_MLA_SPARSE"
FLASH_MLA: Final = "FLASHMLA_SPARSE"
FI_SM90: Final = "FLASHINFER_MLA_SPARSE_SM90"
FI_SM100: Final = "FLASHINFER_MLA_SPARSE"
FI_SM120: Final = "FLASHINFER_MLA_SPARSE_SM120"
FA4: Final = "FLASH_ATTN_MLA_SPARSE_FA4"
REFUSED: Final = None

Expected = str | None
Row = tuple[dict[str, Any], Expected, Expected]
"""A request, what it gives where FlashInfer is usable, and what elsewhere."""

FP8: Final = ("fp8", "fp8_e4m3", "fp8_ds_mla")
UNQUANTIZED: Final = ("auto", "bfloat16")


def _rows(head_size: int, caches: tuple[str, ...], usable: Expected, other: Expected) -> list[Row]:
    return [({"head_size": head_size, "kv_cache_dtype": c}, usable, other) for c in caches]


def _with(rows: list[Row], **fields: Any) -> list[Row]:
    return [(request | fields, usable, other) for request, usable, other in rows]


# No native sparse backend exists for these chips.
ONLY_OURS: Final = [
    row
    for head_size in (576, 512)
    for row in (
        *_rows(head_size, UNQUANTIZED, OURS, OURS),
        *_with(_rows(head_size, UNQUANTIZED, OURS, OURS), num_heads=128),
        *_with(_rows(head_size, UNQUANTIZED, OURS, OURS), index_topk=1024),
        *_with(_rows(head_size, ("auto", "float16"), OURS, OURS), dtype="float16"),
        *_rows(head_size, FP8, OURS, OURS),
        *_with(_rows(head_size, FP8, OURS, OURS), num_heads=128, index_topk=1024),
        *_with(_rows(head_size, FP8, REFUSED, REFUSED), dtype="float16"),
        *_rows(head_size, ("fp8_e5m2",), REFUSED, REFUSED),
    )
]

SM90: Final = [
    *_rows(576, UNQUANTIZED, FLASH_ATTN, FLASH_ATTN),
    *_with(_rows(576, UNQUANTIZED, FLASH_ATTN, FLASH_ATTN), num_heads=128),
    *_rows(576, ("fp8", "fp8_ds_mla"), FLASH_MLA, FLASH_MLA),
    *_rows(576, ("fp8_e4m3",), FI_SM90, OURS),
    *_rows(512, UNQUANTIZED, FI_SM90, FLASH_ATTN),
    *_rows(512, ("fp8_ds_mla",), FLASH_MLA, FLASH_MLA),
    *_rows(512, ("fp8", "fp8_e4m3"), FI_SM90, OURS),
]

# FA4 needs FlashInfer and CUTLASS's Python package. FLASHINFER_MLA_SPARSE passes selection without
# FlashInfer: a fault of upstream's that these rows record, see the report on this backend.
SM10X: Final = [
    *_with(_rows(576, UNQUANTIZED, FLASH_MLA, FLASH_MLA), num_heads=17),
    *_with(_rows(576, UNQUANTIZED, FLASH_MLA, FLASH_MLA), num_heads=128),
    *_rows(576, ("fp8", "fp8_e4m3"), FI_SM100, FI_SM100),
    *_rows(576, ("fp8_ds_mla",), FLASH_MLA, FLASH_MLA),
    *_rows(512, UNQUANTIZED, FI_SM100, FI_SM100),
    *_rows(512, ("fp8", "fp8_e4m3"), FI_SM100, FI_SM100),
    *_rows(512, ("fp8_ds_mla",), OURS, OURS),
]

SM12X: Final = [
    row
    for head_size in (576, 512)
    for row in (
        *_rows(head_size, ("bfloat16",), OURS, OURS),
        *_with(_rows(head_size, ("bfloat16",), OURS, OURS), num_heads=128),
        *_rows(head_size, ("auto",), FI_SM120, OURS),
        *_rows(head_size, FP8, FI_SM120, OURS),
        *_with(_rows(head_size, UNQUANTIZED, OURS, OURS), index_topk=1024),
        *_with(_rows(head_size, UNQUANTIZED, OURS, OURS), index_topk=128),
        *_with(_rows(head_size, FP8, OURS, OURS), index_topk=1024),
        *_with(_rows(head_size, ("auto",), OURS, OURS), dtype="float16"),
    )
]

TABLES: Final = {
    80: ONLY_OURS,
    86: ONLY_OURS,
    89: ONLY_OURS,
    90: SM90,
    100: SM10X,
    103: SM10X,
    110: ONLY_OURS,
    120: SM12X,
    121: SM12X,
}


def _cases() -> Iterator[tuple[int, FlashInfer]]:
    for capability in TABLES:
        for state in FlashInfer:
            yield capability, state


@pytest.mark.parametrize(("capability", "state"), list(_cases()))
def test_every_row(ask: Ask, capability: int, state: FlashInfer) -> None:
    rows = TABLES[capability]
    answers = ask([request for request, _, _ in rows])
    expected = [usable if state is FlashInfer.USABLE else other for _, usable, other in rows]
    selected = [answer["backend"] for answer in answers]
    asked = [request for request, _, _ in rows]
    assert list(zip(asked, selected, strict=True)) == list(zip(asked, expected, strict=True))
    for answer in answers:
        if answer["backend"] is None:
            assert _names_our_reason(answer["error"]), answer["error"]


def _names_our_reason(error: str) -> bool:
    """Whether the error says why ours was refused: the kind of cache, or its activations."""
    ours = error.partition(f"{OURS}: [")[2]
    is_unknown = "does not read the fp8_e5m2" in ours and "--kv-cache-dtype fp8 or bfloat16" in ours
    return is_unknown or "reads the fp8 KV cache with bfloat16 activations only, got torch.float16" in ours


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("state", [FlashInfer.USABLE])
def test_few_heads_on_sm10x_prefer_a_native_backend(ask: Ask) -> None:
    answers = ask([{"num_heads": heads, "kv_cache_dtype": "auto"} for heads in (8, 16)])
    assert {answer["backend"] for answer in answers} <= {FA4, FI_SM100}


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("state", list(FlashInfer))
def test_our_cache_keeps_its_dtype(ask: Ask) -> None:
    """Only the native SM120 backend turns ``auto`` into fp8_ds_mla."""
    answers = ask([{"backend": OURS, "kv_cache_dtype": cache} for cache in UNQUANTIZED])
    assert [(a["backend"], a["cache"]) for a in answers] == [(OURS, "auto"), (OURS, "bfloat16")]


@pytest.mark.parametrize("capability", [86, 100, 121])
@pytest.mark.parametrize("state", [FlashInfer.ABSENT])
def test_our_fp8_cache_has_the_ds_mla_layout(ask: Ask) -> None:
    requests = [
        {"backend": OURS, "kv_cache_dtype": cache, "head_size": size} for cache in FP8 for size in (576, 512)
    ]
    assert {(a["backend"], a["cache"]) for a in ask(requests)} == {(OURS, "fp8_ds_mla")}


GLM: Final = [
    {"architecture": "GlmMoeDsaForCausalLM", "head_size": 576},
    {"architecture": "Glm5NextForConditionalGeneration", "head_size": 512},
]
MODELS: Final = [*GLM, {"architecture": "DeepseekV32ForCausalLM", "head_size": 576}]


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("state", [FlashInfer.USABLE])
def test_glm_makes_auto_an_fp8_cache_on_sm10x(ask: Ask) -> None:
    """Ours serves GLM's default there when it is asked for by name."""
    native, named = ask(GLM), ask([request | {"backend": OURS} for request in GLM])
    assert [a["backend"] for a in native] == [FI_SM100] * 2
    assert [a["backend"] for a in named] == [OURS] * 2
    assert [a["cache"] for a in native] == ["fp8_e4m3", "fp8"]
    assert [a["cache"] for a in named] == ["fp8_ds_mla"] * 2


@pytest.mark.parametrize("capability", [80, 86, 89, 110, 120, 121])
@pytest.mark.parametrize("state", [FlashInfer.ABSENT])
def test_glm_keeps_auto(ask: Ask) -> None:
    assert [(a["backend"], a["cache"]) for a in ask(GLM)] == [(OURS, "auto")] * 2


@pytest.mark.parametrize(("capability", "state"), list(_cases()))
def test_a_bfloat16_cache_stays_one_whatever_the_model(ask: Ask, capability: int) -> None:
    answers = ask([model | {"kv_cache_dtype": "bfloat16"} for model in MODELS])
    assert [answer["cache"] for answer in answers] == ["bfloat16"] * len(MODELS)
    if capability in (120, 121):
        assert [answer["backend"] for answer in answers] == [OURS] * len(MODELS)

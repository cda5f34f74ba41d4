"""The stacks on upstream's releases are as ``ci/matrix.json`` says, and clean on the pinned ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realstacks import ROOT, TARGETS, run_tool
from vllm_stack.pins import load_pin

KEPT = ROOT / "ci" / "matrix.json"
BACKEND = "vllm.v1.attention.backend"
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"


def kept_row(target: str) -> dict[str, Any]:
    """Return what is kept of a target."""
    (row,) = (row for row in json.loads(KEPT.read_text())["targets"] if row["target"] == target)
    return dict(row)


def kept_vllm() -> dict[str, Any]:
    """Return what is kept of vLLM's releases, by release."""
    return {release["release"]: release for release in kept_row("vllm")["releases"]}


def test_the_kept_matrix_is_what_the_stacks_give() -> None:
    """The releases' sources are those that the file has the hashes of."""
    report = run_tool("matrix", "--check", KEPT)
    assert report["differences"] == []
    assert report["targets"] == json.loads(KEPT.read_text())["targets"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_stack_is_clean_on_its_own_release(target: str) -> None:
    pin = load_pin(ROOT / "upstream" / f"{target}.toml")
    row = kept_row(target)
    assert row["pinned"] == pin.release
    (own,) = (release for release in row["releases"] if release["release"] == pin.release)
    assert own["sdist"] == pin.sdist.model_dump()
    assert own["clean"] is True
    assert {(cell["verdict"], cell["outcome"]) for cell in own["patches"]} == {("clean", "strict")}
    assert all(not (cell["contracts"] or cell["conflicts"]) for cell in own["patches"])


def test_the_releases_that_the_stack_is_carried_to_are_in_it() -> None:
    kept = kept_vllm()
    assert list(kept) == ["0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
    assert len({len(release["patches"]) for release in kept.values()}) == 1


@pytest.mark.parametrize(
    ("release", "lost"),
    [
        (
            "0.28.0",
            {
                f"{SPARSE} defines SparseMLACommonMetadata",
                f"class {BACKEND}.MLAAttentionImpl has method reserve_workspace(self) to override",
                f"class {SPARSE}.SparseMLACommonImpl has method prepare_for_batch(self, attn_metadata) "
                "to override",
                "module vllm.models.glm5next.common.attention exists",
                "module vllm.models.glm5next.nvidia.sparse_indexer exists",
            },
        ),
        (
            "0.30.0",
            {
                f"class {SPARSE}.SparseMLACommonImpl declares group_conversion_decode_only, which "
                "TritonMLASparseImpl sets",
                f"class {BACKEND}.MLAAttentionImpl has method reserve_workspace(self) to override",
                f"{BACKEND} defines max_decode_query_len",
                "module vllm.models.glm5next.nvidia.sparse_indexer exists",
            },
        ),
    ],
)
def test_where_a_release_differs_most_every_patch_has_a_verdict_and_the_contracts_say_why(
    release: str, lost: set[str]
) -> None:
    """Base classes, hooks and model files that this release does not have yet."""
    patches = kept_vllm()[release]["patches"]
    assert {patch["verdict"] for patch in patches} <= {"clean", "three-way", "conflict", "contract-broken"}
    assert all(patch["verdict"] == "conflict" for patch in patches if patch["conflicts"])
    assert lost <= {finding["contract"] for patch in patches for finding in patch["contracts"]}


def test_what_an_earlier_patch_would_have_brought_is_not_laid_on_upstream() -> None:
    """E4m3 in software is a file of the stack's own, whose patch conflicts with 0.30.0."""
    patches = {patch["patch"][:4]: patch for patch in kept_vllm()["0.30.0"]["patches"]}
    assert patches["0308"]["verdict"] == "conflict"
    (finding,) = (one for one in patches["0309"]["contracts"] if one["contract"].endswith(".fp8_e4m3 exists"))
    assert finding["found"] == (
        "there is no such module; vllm/v1/attention/ops/fp8_e4m3.py is changed by "
        f"{patches['0308']['patch']}, which is not there"
    )

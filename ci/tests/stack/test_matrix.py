"""The stacks on upstream's releases are as ``ci/matrix.json`` says, and clean on the pinned ones."""

from __future__ import annotations

import json

import pytest

from realstacks import ROOT, TARGETS, run_tool
from vllm_stack.pins import load_pin

KEPT = ROOT / "ci" / "matrix.json"


def test_the_kept_matrix_is_what_the_stacks_give() -> None:
    """The releases' sources are those that the file has the hashes of."""
    report = run_tool("matrix", "--check", KEPT)
    assert report["differences"] == []
    assert report["targets"] == json.loads(KEPT.read_text())["targets"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_stack_is_clean_on_its_own_release(target: str) -> None:
    pin = load_pin(ROOT / "upstream" / f"{target}.toml")
    (row,) = (row for row in json.loads(KEPT.read_text())["targets"] if row["target"] == target)
    assert row["pinned"] == pin.release
    (own,) = (release for release in row["releases"] if release["release"] == pin.release)
    assert own["sdist"] == pin.sdist.model_dump()
    assert own["clean"] is True
    assert {(cell["verdict"], cell["outcome"]) for cell in own["patches"]} == {("clean", "strict")}
    assert all(not (cell["contracts"] or cell["conflicts"]) for cell in own["patches"])


def test_the_releases_that_the_stack_is_carried_to_are_in_it() -> None:
    (row,) = (row for row in json.loads(KEPT.read_text())["targets"] if row["target"] == "vllm")
    assert [release["release"] for release in row["releases"]] == ["0.31.0", "0.32.0", "0.33.0"]
    assert len({len(release["patches"]) for release in row["releases"]}) == 1

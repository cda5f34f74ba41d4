"""The reports of the GPU host in the repository say what they must, and what they say passes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from realstacks import ROOT

RESULTS = ROOT / "ci" / "gpu" / "results"


def report(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_report_names_what_it_measured(path: Any) -> None:
    document = json.loads(path.read_text())
    assert document["result"] == "passed"
    files = document["wheel_files"]
    assert len(files["commit"]) == 40
    assert len(files["stack_id"]) == len(files["wheel"]["sha256"]) == 64
    host = document.get("host", document)
    assert host["torch"]
    assert host["triton"]
    assert "H200" in (host.get("card") or host["gpu"])
    # The members' hashes are those of the wheel, checked on the host.
    assert "vllm/v1/attention/ops/triton_mla_sparse.py" in files["members"]


def test_the_kernel_was_within_its_bounds_everywhere() -> None:
    document = report("kernel-check")
    assert document["shapes"] >= 300
    assert document["problems"] == []
    assert document["variants_launched"] <= document["variants_compiled"]


def test_the_sanitizers_found_nothing_and_could_have() -> None:
    checks = report("sanitizer")["checks"]
    for tool in ("memcheck", "racecheck"):
        assert (checks[tool]["refused"], checks[tool]["found"]) == (False, 0)
        assert sum(shape["fp8"] for shape in checks[tool]["shapes"]) > 0
        assert not all(shape["fp8"] for shape in checks[tool]["shapes"])
        assert checks[f"{tool}-planted"]["found"] > 0


def test_the_soak_was_half_an_hour_without_a_finding() -> None:
    document = report("soak")
    assert document["seconds"] >= 1800
    assert len(document["engines"]) == 4  # two models, two caches
    assert document["replays"] > 0
    assert [document[finding] for finding in ("not_finite", "differing", "hangs")] == [[], [], []]


@pytest.mark.parametrize("name", ["fp8", "wide", "groups", "dcp", "pipeline"])
def test_the_complete_backend_was_within_its_bounds(name: str) -> None:
    for mode in report(name)["modes"]:
        for part in mode["differences"].values():
            assert part["bound"] > 0
            assert max(part["ours"].values()) <= part["bound"], mode["mode"]


def test_the_table_is_what_the_reports_give() -> None:
    script = ROOT / "ci" / "gpu" / "results_table.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0

"""The speed table of the kernels is whole, or the step fails."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import kernel_bench
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("budget", "missing"), [(100.0, 0), (-1.0, 20)])
def test_points_that_were_not_measured_fail(
    budget: float, missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(load_kernel=lambda _: None, load_decode_kernel=lambda _: None, measured_on=dict)
    monkeypatch.setattr(kernel_bench, "standalone", nothing)
    monkeypatch.setattr(kernel_bench, "flash_mla_error", lambda: None)
    monkeypatch.setattr(kernel_bench, "make_cache", lambda _: None)
    monkeypatch.setattr(kernel_bench, "Problem", lambda *_, **__: None)
    monkeypatch.setattr(kernel_bench, "time_point", lambda *_, **__: {kernel_bench.OURS: 2.0})
    monkeypatch.setattr(kernel_bench, "time_fp8_point", lambda *_, **__: {kernel_bench.OURS_FP8: 1.0})
    out = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["kernel_bench", "--out", str(out), "--budget-s", str(budget)])
    assert kernel_bench.main() == bool(missing)
    report = json.loads(out.read_text())
    assert (len(report["points"]), len(report["not_measured"])) == (20 - missing, missing)

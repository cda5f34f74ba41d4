"""The real stacks, on the real pinned files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from realstacks import ROOT, TARGETS, AppliedCheckout, run_tool


@pytest.fixture(scope="session")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AppliedCheckout]:
    """A checkout of each real stack."""
    root = tmp_path_factory.mktemp("real stacks")
    (root / "upstream").mkdir()
    for target in TARGETS:
        shutil.copy(ROOT / "upstream" / f"{target}.toml", root / "upstream")
    shutil.copytree(ROOT / "patch-stack", root / "patch-stack")
    report = run_tool("apply", "--root", root)
    return {
        done["target"]: AppliedCheckout(
            Path(done["folder"]), done["base"], tuple(patch["commit"] for patch in done["patches"])
        )
        for done in report["targets"]
    }

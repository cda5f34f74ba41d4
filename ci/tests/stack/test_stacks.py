"""The real stacks keep their rules, and every tree on the way is one that upstream's checks pass."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from realstacks import ROOT, TARGETS, AppliedCheckout, run_tool

if TYPE_CHECKING:
    from pathlib import Path

#: What must have run on a stack's Python files: a check that upstream renames would vanish otherwise.
CHECKS = {
    "vllm": ("ruff-check", "ruff-format", "typos", "mypy", "check-spdx-header", "check-forbidden-imports"),
    # Its sdist comes without a pre-commit configuration.
    "vllm-gguf-plugin": ("ruff-check", "ruff-format", "typos"),
}
UPSTREAM_PYTHON = ROOT / ".venv-upstream" / "bin" / "python"


def test_lint_finds_nothing() -> None:
    report = run_tool("lint")
    assert [linted["target"] for linted in report["targets"]] == list(TARGETS)
    for linted in report["targets"]:
        assert linted["patches"]
        assert [finding for finding in linted["findings"] if finding["level"] == "error"] == []


def test_every_patch_is_what_re_exporting_it_gives() -> None:
    for target in run_tool("refresh", "--check")["targets"]:
        assert target["differing"] == []
        assert {file["action"] for file in target["files"]} == {"same"}


def test_applying_again_gives_the_same_commits(checkouts: dict[str, AppliedCheckout], tmp_path: Path) -> None:
    (tmp_path / "upstream").mkdir()
    for path in ("upstream/vllm-gguf-plugin.toml", "patch-stack"):
        (tmp_path / path).symlink_to(ROOT / path)
    report = run_tool("apply", "--root", tmp_path, "--target", "vllm-gguf-plugin")
    commits = tuple(patch["commit"] for patch in report["targets"][0]["patches"])
    assert commits == checkouts["vllm-gguf-plugin"].commits


@pytest.mark.parametrize("target", TARGETS)
def test_upstreams_checks_pass_after_every_patch(checkouts: dict[str, AppliedCheckout], target: str) -> None:
    checkout = checkouts[target]
    assert checkout.commits
    for commit in checkout.commits:
        checkout.git("checkout", "--quiet", "--detach", commit)
        # Everything that the stack has changed so far: a patch may break what an earlier one added.
        files = checkout.changed(checkout.base, commit)
        done = subprocess.run(
            [UPSTREAM_PYTHON, ROOT / "ci" / "upstream_checks.py", checkout.folder, *files],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"after {commit}:\n{done.stdout}{done.stderr}"
        expected = CHECKS[target]
        assert [name for name in expected if f"{name}: passed" not in done.stdout] == []


def test_upstreams_checks_can_fail(checkouts: dict[str, AppliedCheckout]) -> None:
    checkout = checkouts["vllm"]
    bad = checkout.folder / "vllm" / "v1" / "bad_file.py"
    bad.write_text("import triton\nimport os\n")
    done = subprocess.run(
        [UPSTREAM_PYTHON, ROOT / "ci" / "upstream_checks.py", checkout.folder, "vllm/v1/bad_file.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    bad.unlink()
    assert done.returncode == 1
    for name in ("ruff-check", "check-spdx-header", "check-forbidden-imports"):
        assert f"{name}: FAILED" in done.stdout


def test_reports_are_json_with_a_schema() -> None:
    assert json.loads(json.dumps(run_tool("status")))["schema"] == 1

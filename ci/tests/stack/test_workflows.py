"""The workflows of GitHub are valid, may do little, and run nothing that is not pinned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from realstacks import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = Path(sys.executable).with_name("actionlint")
WATCH = ROOT / ".github" / "workflows" / "upstream-watch.yml"


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    words = [str(ACTIONLINT), "-no-color", "-shellcheck=", "-pyflakes=", *map(str, files)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_workflows_pass_actionlint() -> None:
    assert WATCH in WORKFLOWS
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("github.token", "github.tokne", "tokne"),
        ("issues: write", "issues: wirte", "wirte"),
        ("needs: report", "needs: reports", "reports"),
        ("23 5 * * *", "23 25 * * *", "cron"),
        ("    timeout-minutes: 30\n", "    timeout-minuts: 30\n", "timeout-minuts"),
    ],
)
def test_actionlint_can_fail(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = WATCH.read_text()
    assert old in text
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace(old, new))
    done = lint(broken)
    assert done.returncode == 1
    assert said in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    used = re.findall(r"(?m)^\s*(?:- )?uses:\s*(.*)$", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_the_watch_may_do_little() -> None:
    text = WATCH.read_text()
    assert re.search(r"(?m)^permissions: \{\}$", text)
    jobs = dict(re.findall(r"(?ms)^  (report|issues):\n(.*?)(?=^  \w|\Z)", text))
    granted = {
        name: re.findall(
            r"(?m)^      (\S+: (?:read|write))$", job.partition("permissions:")[2].partition("steps:")[0]
        )
        for name, job in jobs.items()
    }
    assert granted == {"report": ["contents: read"], "issues": ["contents: read", "issues: write"]}
    assert text.count("persist-credentials: false") == text.count("actions/checkout@") == 2
    # What runs is in the repository; no value from outside is put into a shell's words.
    commands = re.findall(r"(?m)^\s*run: (.*)$", text)
    assert commands == [
        "python3 ci/upstream_watch.py report watch --git",
        "python3 ci/upstream_watch.py publish watch",
    ]
    assert "github.token" not in jobs["report"]
    assert "concurrency:\n  group: upstream-watch\n" in text

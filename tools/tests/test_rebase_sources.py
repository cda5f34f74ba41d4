"""Rebasing on upstream's repository, and what a rebase says of third parties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from indexserver import IndexServer, only_source
from upstreamrepo import Upstream, pin_git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stackproject import Project


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """The user's only package source."""
    with only_source(monkeypatch) as running:
        yield running


@pytest.fixture
def upstream(stacked: Project, server: IndexServer, tmp_path: Path) -> Upstream:
    """Release 1.1.0, which conflicts with the last patch and pins another torch."""
    made = Upstream(tmp_path / "upstream")
    made.tag("1.0.0")
    pin_git(stacked, made.url)
    made.commit("[Build] Pin torch (#2)", {"requirements/cuda.txt": "torch==2.14.0\n"})
    made.edit("demo/core.py", "return 9\n", "return 99\n", "[Core] Return ninety-nine (#4321)")
    made.tag("1.1.0")
    server.files |= made.archives("1.1.0")
    return made


def test_with_a_git_source_a_conflict_names_the_pull_request(stacked: Project, upstream: Upstream) -> None:
    done = stacked.run("rebase-upstream", "1.1.0", "--dry-run", "--source", "git")
    assert done.code == 5
    conflict = done.report["patches"][2]
    assert conflict["verdict"] == "conflict"
    commits = [
        commit for file in conflict["conflicts"] for hunk in file["hunks"] for commit in hunk["commits"]
    ]
    assert [commit["pull_request"] for commit in commits] == [4321]
    assert "#4321" in done.out
    sdist = stacked.run("rebase-upstream", "1.1.0", "--dry-run")
    verdicts = [patch["verdict"] for patch in done.report["patches"]]
    assert [patch["verdict"] for patch in sdist.report["patches"]] == verdicts
    assert "#4321" not in sdist.out


def test_a_rebase_gives_the_same_files_from_both_sources(
    stacked: Project, upstream: Upstream, server: IndexServer, tmp_path: Path
) -> None:
    """Pin, patches and series do not tell what the base was made of."""
    third = stacked.stack.patches[2].name
    results = []
    before = {path: path.read_bytes() for path in files_of(stacked)}
    for source in ("sdist", "git"):
        stacked.ok("apply")
        stacked.ok("rebase-upstream", "1.1.0", "--source", source, "--skip", third, "--reason", "a test")
        results.append({str(path): path.read_bytes() for path in files_of(stacked)})
        for path in files_of(stacked):
            path.unlink()
        for path, data in before.items():
            path.write_bytes(data)
        stacked.ok("apply", "--force")
    assert results[0] == results[1]
    assert b'release = "1.1.0"' in results[0][str(stacked.workspace.pin_file("demo"))]


def test_going_on_can_name_the_pull_requests_too(
    stacked: Project, upstream: Upstream, server: IndexServer
) -> None:
    upstream.edit("demo/core.py", "return 1\n", "return 11\n", "[Core] Return eleven (#777)")
    upstream.tag("1.2.0")
    server.files |= upstream.archives("1.2.0")
    first = stacked.stack.patches[0].name
    done = stacked.run("rebase-upstream", "1.2.0", "--source", "git")
    assert (done.code, done.report["waits_at"]) == (5, first)
    assert "#777" in done.out
    done = stacked.run("rebase-upstream", "--skip", first, "--reason", "a test", "--source", "git")
    assert (done.code, done.report["waits_at"]) == (5, stacked.stack.patches[2].name)
    assert "#4321" in done.out
    assert "#4321" not in stacked.run("rebase-upstream", "--continue").out
    stacked.ok("rebase-upstream", "--abort")


def files_of(project: Project) -> list[Path]:
    return [project.workspace.pin_file("demo"), *sorted(project.series.parent.glob("*"))]


def test_a_dry_run_compares_what_upstream_pins_of_others(stacked: Project, upstream: Upstream) -> None:
    done = stacked.run("rebase-upstream", "1.1.0", "--dry-run")
    assert done.report["third_party"] == {
        "changes": [
            {
                "kind": "python",
                "name": "torch",
                "old": None,
                "new": "==2.14.0",
                "file": "requirements/cuda.txt",
            }
        ],
        "unread": [],
    }
    assert done.out.endswith(
        "what upstream pins of others:\n  requirements/cuda.txt\n    torch: new, ==2.14.0\n"
    )


def test_what_keeps_a_release_from_being_pinned_stops_a_rebase_alone(
    stacked: Project, upstream: Upstream, server: IndexServer
) -> None:
    for name in [name for name in server.files if name.endswith(".whl")]:
        del server.files[name]
    done = stacked.run("rebase-upstream", "1.1.0")
    assert (done.code, done.error["message"]) == (2, "demo 1.1.0 cannot become the pin")
    assert done.error["details"] == ["demo 1.1.0 has no Linux wheel for x86_64: only its sdist can be used"]
    assert stacked.run("rebase-upstream", "1.1.0", "--dry-run").code == 5

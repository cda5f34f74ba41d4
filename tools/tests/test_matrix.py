"""Stacks against releases: all patches, all releases, and a matrix that is kept and compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from indexserver import IndexServer, only_source
from stackproject import Project, make_target
from upstreamrepo import Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST, SECOND, THIRD = (
    "0100-demo-topic-return-a-hundred.patch",
    "0101-demo-topic-add-a-module.patch",
    "0200-second-return-nine-hundred.patch",
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """The user's only package source."""
    with only_source(monkeypatch) as running:
        yield running


@pytest.fixture
def releases(stacked: Project, server: IndexServer, tmp_path: Path) -> Upstream:
    """Releases 0.9.0, 1.1.0 (lines moved) and 1.2.0 (absorbs the first patch, conflicts with the third)."""
    upstream = Upstream(tmp_path / "upstream")
    upstream.git("tag", "v0.9.0")
    upstream.edit("demo/core.py", "def function_0", "# A comment.\n\n\ndef function_0", "[Doc] Say it (#2)")
    upstream.git("tag", "v1.1.0")
    upstream.edit("demo/core.py", "return 1\n", "return 100\n", "[Core] Return a hundred (#3)")
    upstream.edit("demo/core.py", "return 9\n", "return 99\n", "[Core] Return ninety-nine (#4)")
    upstream.git("tag", "v1.2.0")
    for version in ("0.9.0", "1.1.0", "1.2.0"):
        server.files |= upstream.archives(version)
    assert [patch.name for patch in stacked.stack.patches] == [FIRST, SECOND, THIRD]
    return upstream


def verdicts(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the verdicts by release."""
    (row,) = report["targets"]
    return {
        release["release"]: [patch["verdict"] for patch in release["patches"]] for release in row["releases"]
    }


def test_every_patch_gets_a_verdict_on_every_release(stacked: Project, releases: Upstream) -> None:
    before = snapshot(stacked)
    done = stacked.ok("matrix", "1.0.0", "1.1.0", "1.2.0")
    assert verdicts(done.report) == {
        "1.0.0": ["clean", "clean", "clean"],
        "1.1.0": ["clean", "clean", "clean"],
        "1.2.0": ["absorbed", "clean", "conflict"],
    }
    (row,) = done.report["targets"]
    assert [release["clean"] for release in row["releases"]] == [True, True, False]
    assert (row["pinned"], row["stack_id"]) == ("1.0.0", stacked.stack.stack_id)
    assert [patch["outcome"] for patch in row["releases"][1]["patches"]] == ["offset", "strict", "offset"]
    conflict = {"path": "demo/core.py", "new_path": "demo/core.py", "status": "modified"}
    assert row["releases"][2]["patches"][2]["conflicts"] == [conflict]
    assert snapshot(stacked) == before


def snapshot(project: Project) -> dict[str, bytes]:
    """Return all files that a command must not change."""
    files = [path for folder in ("upstream", "patch-stack") for path in (project.root / folder).rglob("*")]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def test_the_table_names_all(stacked: Project, releases: Upstream) -> None:
    out = stacked.ok("matrix", "1.0.0", "1.2.0").out.splitlines()
    assert out[0] == "demo: 3 patches, written for 1.0.0"
    assert out[1].split() == ["1.0.0", "1.2.0"]
    assert [line.split() for line in out[2:5]] == [
        [FIRST.removesuffix(".patch"), "clean", "absorbed"],
        [SECOND.removesuffix(".patch"), "clean", "clean"],
        [THIRD.removesuffix(".patch"), "clean", "conflict"],
    ]
    assert len({line.index(line.split()[1]) for line in out[2:5]}) == 1
    assert out[5:7] == [f"1.2.0, {THIRD}: conflict", "  demo/core.py: does not merge (modified)"]


def test_a_contract_that_breaks_is_in_it(stacked: Project, releases: Upstream, server: IndexServer) -> None:
    stacked.write("demo/user.py", "from demo.core import function_5\n\nX = function_5()\n")
    text = (
        "[Second] Use it\n\nIt is needed.\n\nTopic: second\nUpstream-Status: Pending\nDrop-When: never\n"
        "Why-Not-Plugin: none\nSigned-off-by: Contributor <contributor@example.invalid>\n"
    )
    stacked.commit(text)
    stacked.ok("refresh")
    releases.edit("demo/core.py", "def function_5", "def function_fifty", "[Core] Rename (#5)")
    releases.git("tag", "v1.3.0")
    server.files |= releases.archives("1.3.0")
    done = stacked.ok("matrix", "1.3.0")
    cell = done.report["targets"][0]["releases"][0]["patches"][3]
    assert cell["verdict"] == "contract-broken"
    assert [(broken["path"], broken["line"]) for broken in cell["contracts"]] == [("demo/user.py", 1)]
    assert "function_5" in cell["contracts"][0]["contract"]
    assert "demo/user.py:1: " in done.out


def test_the_json_is_the_same_elsewhere(
    stacked: Project, releases: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stacked.ok("matrix", "0.9.0", "1.2.0").report
    moved = tmp_path / "another place"
    stacked.root.rename(moved)
    stacked.root = moved
    for folder in ("bases", "downloads", "releases"):
        (moved / "cache" / folder).rename(moved / f"old {folder}")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    # The pinned release's sdist is in no index: it has to come from the cache.
    (moved / "cache" / "bases").mkdir()
    for base in (moved / "old bases").glob("demo-1.0.0-*"):
        base.rename(moved / "cache" / "bases" / base.name)
    assert stacked.ok("matrix", "0.9.0", "1.2.0").report == first


def test_one_release_named_twice_counts_once(stacked: Project, releases: Upstream) -> None:
    assert list(verdicts(stacked.ok("matrix", "1.2.0", "latest", "1.2.0").report)) == ["1.2.0"]


# -- several targets


def test_a_release_counts_for_the_targets_that_have_it(
    stacked: Project, releases: Upstream, server: IndexServer
) -> None:
    make_target(stacked, "second")
    pin = stacked.workspace.pin_file("second")
    pin.write_text(
        pin.read_text()
        .replace('distribution = "demo"', 'distribution = "other"')
        .replace('filename = "demo-1.0.0-', 'filename = "other-1.0.0-')
    )
    report = stacked.run("matrix", "1.1.0").report
    # The other project is in no package source at all.
    assert report["error"]["kind"] == "network"
    assert verdicts(stacked.ok("matrix", "1.1.0", "--target", "demo").report)["1.1.0"] == ["clean"] * 3
    assert verdicts(stacked.ok("matrix", "demo=1.1.0").report)["1.1.0"] == ["clean"] * 3
    done = stacked.run("matrix", "second=1.1.0", "--target", "demo")
    assert (done.code, done.error["kind"]) == (2, "usage")
    server.other["other"] = {"other-7.0.0.tar.gz": b"x"}
    assert verdicts(stacked.ok("matrix", "1.1.0").report)["1.1.0"] == ["clean"] * 3
    done = stacked.run("matrix", "6.5.4")
    assert (done.code, done.error["message"]) == (2, "there is no demo 6.5.4 in the package sources")


# -- a matrix that is kept


@pytest.fixture
def kept(stacked: Project, releases: Upstream) -> Path:
    path = stacked.root / "matrix.json"
    path.write_text(json.dumps(stacked.ok("matrix", "1.0.0", "1.2.0").report))
    return path


def test_a_kept_matrix_that_is_still_true(stacked: Project, server: IndexServer, kept: Path) -> None:
    asked = [path for path, _ in server.requests]
    done = stacked.ok("matrix", "--check", str(kept))
    assert done.report["differences"] == []
    assert f"as in {kept}" in done.out
    assert [path for path, _ in server.requests] == asked


def test_a_release_that_the_layout_does_not_fit_can_be_kept(
    stacked: Project, releases: Upstream, server: IndexServer
) -> None:
    releases.commit("[Core] No operators (#5)", {"demo/_custom_ops.py": None})
    releases.git("tag", "v1.3.0")
    server.files |= releases.archives("1.3.0")
    path = stacked.root / "matrix.json"
    report = stacked.ok("matrix", "1.3.0").report
    (row,) = report["targets"]
    (release,) = row["releases"]
    (note,) = release["notes"]
    assert note.startswith("layout.native: there is no demo/_custom_ops.py any more")
    release["notes"] = ["no package source gives a hash of it", note]
    path.write_text(json.dumps(report))
    assert stacked.ok("matrix", "--check", str(path)).report["differences"] == []
    release["notes"] = []
    path.write_text(json.dumps(report))
    lines = stacked.run("matrix", "--check", str(path)).error["details"]
    assert any("layout.native" in line and "absent in the file" in line for line in lines)


def test_what_differs_from_a_kept_matrix_is_named(stacked: Project, kept: Path) -> None:
    document = json.loads(kept.read_text())
    document["targets"][0]["releases"][1]["patches"][0]["verdict"] = "clean"
    del document["targets"][0]["releases"][1]["patches"][2]["conflicts"][0]
    kept.write_text(json.dumps(document))
    done = stacked.run("matrix", "--check", str(kept))
    assert (done.code, done.error["kind"]) == (6, "lint")
    assert (
        f'demo releases 1.2.0 patches {FIRST} verdict: "clean" in the file, "absorbed" now'
        in done.error["details"]
    )
    assert any(f"{THIRD} conflicts" in line for line in done.error["details"])


def test_a_changed_stack_differs_from_a_kept_matrix(stacked: Project, kept: Path) -> None:
    stacked.git("reset", "--quiet", "--hard", "HEAD^")
    stacked.ok("refresh", "--drop", THIRD)
    done = stacked.run("matrix", "--check", str(kept))
    assert done.code == 6
    assert any(line.startswith("demo stack_id: ") for line in done.error["details"])
    assert any(f"{THIRD} verdict" in line and "absent now" in line for line in done.error["details"])


def test_sources_that_are_not_those_of_the_kept_matrix_are_refused(
    stacked: Project, releases: Upstream, server: IndexServer, kept: Path
) -> None:
    for folder in (*stacked.workspace.bases.glob("demo-1.2.0-*"), *stacked.workspace.downloads.iterdir()):
        folder.rename(stacked.root / folder.name)
    server.files["demo-1.2.0.tar.gz"] = releases.sdist("1.2.0", {"demo/core.py": "X = 1\n"})
    done = stacked.run("matrix", "--check", str(kept))
    assert (done.code, done.error["kind"]) == (4, "integrity")


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, 2), ("{", 2), ("{}", 2), ('{"schema": 1, "command": "lint", "targets": []}', 2)],
)
def test_files_that_are_no_matrix(stacked: Project, tmp_path: Path, text: str | None, code: int) -> None:
    path = tmp_path / "kept.json"
    if text is not None:
        path.write_text(text)
    assert stacked.run("matrix", "--check", str(path)).code == code


@pytest.mark.parametrize("words", [(), ("1.0.0", "--check", "x.json")])
def test_releases_or_a_file(stacked: Project, words: tuple[str, ...]) -> None:
    assert stacked.run("matrix", *words).code == 2

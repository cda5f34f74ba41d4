"""The daily watch: what it finds in an index, what it writes, and what it does to issues."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from indexserver import IndexServer, only_source
from upstreamrepo import Upstream, pin_git

import upstream_watch as watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stackproject import Project

#: The part of the GitHub CLI that is used, on a file in place of GitHub.
GH = f"""#!{sys.executable}
import json, pathlib, sys
store = pathlib.Path(__file__).with_name("issues.json")
issues = json.loads(store.read_text())
words = sys.argv[1:]
with pathlib.Path(__file__).with_name("calls.txt").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
value = lambda name: words[words.index(name) + 1]
if words[:2] == ["issue", "list"]:
    print(json.dumps([one for one in issues if value("--label") in one["labels"]]))
elif words[:2] == ["issue", "create"]:
    issues.append({{"number": len(issues) + 1, "title": value("--title"), "body": sys.stdin.read(),
                    "state": "OPEN", "labels": [value("--label")]}})
elif words[:2] == ["issue", "edit"]:
    issues[int(words[2]) - 1].update(title=value("--title"), body=sys.stdin.read())
elif words[:2] == ["issue", "close"]:
    issues[int(words[2]) - 1]["state"] = "CLOSED"
elif words[:2] != ["label", "create"]:
    sys.exit(1)
store.write_text(json.dumps(issues))
"""
ONE = watch.Watched(
    "demo", "1.0.0", "1.1.0", "demo 1.1.0: all patches apply", "<!-- upstream-watch: demo -->\ntext\n"
)


class GitHub:
    """What the stand-in for GitHub holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gh").write_text(GH)
        (folder / "gh").chmod(stat.S_IRWXU)
        (folder / "issues.json").write_text("[]")

    @property
    def issues(self) -> list[dict[str, Any]]:
        """All issues, the first one first."""
        found: list[dict[str, Any]] = json.loads((self.folder / "issues.json").read_text())
        return found

    def change(self, number: int, **values: str) -> None:
        """Change an issue as somebody on GitHub would."""
        issues = self.issues
        issues[number - 1].update(values)
        (self.folder / "issues.json").write_text(json.dumps(issues))

    @property
    def calls(self) -> list[list[str]]:
        """The first words of each call since this was asked the last time."""
        lines = (self.folder / "calls.txt").read_text().splitlines()
        (self.folder / "calls.txt").unlink()
        return [json.loads(line)[:3] for line in lines]


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GitHub:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return GitHub(folder)


def publish(folder: Path, *found: watch.Watched) -> None:
    (folder / "watch.json").write_text(json.dumps([vars(one) for one in found]))
    assert watch.main(["publish", str(folder)]) == 0


# -- what is done to issues


def test_one_issue_per_target_is_opened_and_kept_up_to_date(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE, replace(ONE, target="other", body="<!-- upstream-watch: other -->\n"))
    assert [issue["title"] for issue in github.issues] == [ONE.title, ONE.title]
    assert github.issues[0]["body"] == ONE.body
    publish(tmp_path, ONE)
    assert len(github.issues) == 2
    later = replace(
        ONE, latest="1.2.0", title="demo 1.2.0: 1 of 3 patches need work", body=ONE.body + "more\n"
    )
    publish(tmp_path, later)
    assert (github.issues[0]["title"], github.issues[0]["body"]) == (later.title, later.body)
    assert len(github.issues) == 2


def test_what_is_the_same_is_not_written_again(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE)
    assert github.calls == [
        ["label", "create", "upstream-watch"],
        ["issue", "list", "--label"],
        ["issue", "create", "--label"],
    ]
    github.change(1, body=ONE.body.replace("\n", "\r\n"))
    publish(tmp_path, ONE)
    assert github.calls == [["label", "create", "upstream-watch"], ["issue", "list", "--label"]]


def test_the_issue_is_closed_when_the_stack_is_there(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE)
    publish(tmp_path, replace(ONE, pinned="1.1.0"))
    assert [issue["state"] for issue in github.issues] == ["CLOSED"]
    publish(tmp_path, replace(ONE, pinned="1.1.0"))
    assert len(github.issues) == 1


def test_an_issue_that_somebody_closed_is_not_opened_again(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE)
    github.change(1, state="CLOSED")
    publish(tmp_path, replace(ONE, title="demo 1.1.0: 1 of 3 patches need work"))
    assert len(github.issues) == 1
    publish(tmp_path, replace(ONE, latest="1.2.0", title="demo 1.2.0: all patches apply"))
    assert [issue["state"] for issue in github.issues] == ["CLOSED", "OPEN"]


def test_of_two_open_issues_the_newer_is_closed(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE)
    github.change(1, labels="elsewhere")  # not listed, so that a second one is opened
    publish(tmp_path, ONE)
    github.change(1, labels="upstream-watch")
    publish(tmp_path, ONE)
    assert [issue["state"] for issue in github.issues] == ["OPEN", "CLOSED"]


def test_issues_of_others_are_left_alone(github: GitHub, tmp_path: Path) -> None:
    publish(tmp_path, ONE)
    github.change(1, body="Somebody wrote about <!-- upstream-watch: demo -->", title="mine")
    publish(tmp_path, ONE)
    assert [issue["title"] for issue in github.issues] == ["mine", ONE.title]


def test_a_failing_github_fails_the_run(github: GitHub, tmp_path: Path) -> None:
    (github.folder / "gh").write_text("#!/bin/sh\nexit 4\n")
    (tmp_path / "watch.json").write_text(json.dumps([vars(ONE)]))
    with pytest.raises(SystemExit, match="gh label create failed with exit status 4"):
        watch.main(["publish", str(tmp_path)])


# -- what is written


def document(**values: Any) -> dict[str, Any]:
    return {
        "target": "demo",
        "old_release": "1.0.0",
        "new_release": "1.1.0",
        "notes": [],
        "patches": [{"name": "0100-a.patch", "verdict": "clean"}],
        "third_party": {"changes": [], "unread": []},
        **values,
    }


def test_nothing_of_upstreams_text_is_markdown() -> None:
    text = "```\n@everyone closes #1 <img src=x>\n````\n"
    change = {"name": "a`b|c", "old": None, "new": "@x | `y`", "file": "f"}
    made = watch.watched(
        document(notes=["@team `x`\n# Title"], third_party={"changes": [change], "unread": []}), text
    ).body
    assert "\n`````text\n```\n@everyone closes #1 <img src=x>\n````\n`````\n" in made
    assert "\n- ``@team `x` # Title``\n" in made
    assert "| ``a`b\\|c`` | - | `` @x \\| `y` `` | `f` |" in made


def test_titles_count_what_needs_work() -> None:
    verdicts = ["clean", "three-way", "absorbed", "conflict", "contract-broken", "malformed"]
    patches = [{"name": verdict, "verdict": verdict} for verdict in verdicts]
    assert watch.watched(document(patches=patches), "").title == "demo 1.1.0: 4 of 6 patches need work"
    assert watch.watched(document(), "").title == "demo 1.1.0: all patches apply"


def test_a_text_fits_into_an_issue() -> None:
    body = watch.watched(document(), "x" * 200_000).body
    assert len(body) < 65_536
    assert body.startswith("<!-- upstream-watch: demo -->\n")
    assert "[cut here; all of it is in the artifact of the run]\n```\n\n</details>\n" in body


@pytest.mark.parametrize(
    ("pinned", "latest", "new"),
    [
        ("0.9.0", "0.10.0", True),
        ("0.33.0", "0.33.0", False),
        ("0.34.0", "0.33.0", False),
        ("0.33.0", "0.33.0.post1", True),
        ("0.33.0.post1", "0.33.0", False),
        ("0.34.0rc2", "0.34.0", True),
        ("0.34.0rc2", "0.33.0", False),
        ("0.34.0.dev12", "0.34.0", True),
    ],
)
def test_only_a_newer_release_is_told(pinned: str, latest: str, *, new: bool) -> None:
    assert replace(ONE, pinned=pinned, latest=latest).is_new is new


# -- from the index to the issue


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """The user's only package source, once the launcher has made its environment from the real ones."""
    assert watch.dry_run(Path("/nonexistent"), Path("/nonexistent"), "x", "x", "auto")[0] is None
    with only_source(monkeypatch) as running:
        yield running


def test_a_new_release_is_found_tried_and_told(
    stacked: Project, server: IndexServer, github: GitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STACK_CACHE", str(stacked.root / "cache"))
    upstream = Upstream(tmp_path / "upstream")
    upstream.edit("demo/core.py", "return 9\n", "return 99\n", "[Core] Return ninety-nine (#2)")
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    folder = tmp_path / "out"
    stacked.capsys.readouterr()
    assert watch.main(["report", str(folder), "--root", str(stacked.root)]) == 0
    out = stacked.capsys.readouterr().out
    assert out.startswith("demo 1.1.0: 1 of 3 patches need work\n\n<!-- upstream-watch: demo -->\n")
    assert watch.main(["publish", str(folder)]) == 0
    (issue,) = github.issues
    assert "| `0200-second-return-nine-hundred.patch` | conflict |" in issue["body"]
    assert "demo/core.py" in issue["body"]
    assert json.loads((folder / "demo.json").read_text())["new_release"] == "1.1.0"


def test_upstreams_repository_is_used_where_it_can_be(
    stacked: Project, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STACK_CACHE", str(stacked.root / "cache"))
    upstream = Upstream(tmp_path / "upstream")
    upstream.tag("1.0.0")
    upstream.edit("demo/core.py", "return 9\n", "return 99\n", "[Core] Return ninety-nine (#4321)")
    upstream.tag("1.1.0")
    server.files |= upstream.archives("1.1.0")
    words = ["report", str(tmp_path / "out"), "--root", str(stacked.root), "--git"]
    assert watch.main(words) == 0
    done = stacked.capsys.readouterr()
    assert "cannot reach" in done.err
    assert "conflict" in done.out
    assert "#4321" not in done.out
    pin_git(stacked, upstream.url)
    assert watch.main(words) == 0
    assert "#4321" in stacked.capsys.readouterr().out


def test_no_new_release_is_said_and_closes_the_issue(
    stacked: Project, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STACK_CACHE", str(stacked.root / "cache"))
    server.files["demo-1.0.0.tar.gz"] = stacked.sdist.read_bytes()
    stacked.capsys.readouterr()
    assert watch.main(["report", str(tmp_path / "out"), "--root", str(stacked.root)]) == 0
    assert stacked.capsys.readouterr().out == "demo: the stack is on 1.0.0, the latest release is 1.0.0\n"
    (found,) = json.loads((tmp_path / "out" / "watch.json").read_text())
    assert found["latest"] == found["pinned"]


def test_a_stack_that_does_not_apply_to_its_own_release_fails_the_run(
    stacked: Project, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STACK_CACHE", str(stacked.root / "cache"))
    server.files["demo-1.0.0.tar.gz"] = stacked.sdist.read_bytes()
    first = stacked.patch_file(stacked.stack.patches[0].name)
    first.write_bytes(first.read_bytes().replace(b"-    return 1\n", b"-    return 7\n"))
    assert watch.main(["report", str(tmp_path / "out"), "--root", str(stacked.root)]) == 1
    assert "does not apply to its own release" in stacked.capsys.readouterr().err


def test_an_index_that_fails_fails_the_run_but_not_the_report(
    stacked: Project, server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STACK_CACHE", str(stacked.root / "cache"))
    stacked.capsys.readouterr()
    assert watch.main(["report", str(tmp_path / "out"), "--root", str(stacked.root)]) == 1
    assert "no package source has anything of demo" in stacked.capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "watch.json").read_text()) == []

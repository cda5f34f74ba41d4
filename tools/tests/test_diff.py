"""``diff``: two versions of a stack, on a real repository of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from stackproject import FILES, GENERATED, Project, make_sdist, make_target, message

from vllm_stack.base import Base
from vllm_stack.comparing import Setting, settings_between
from vllm_stack.hashing import sha256_bytes
from vllm_stack.pins import load_pin

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FIRST, SECOND, THIRD = (
    "0100-demo-topic-return-a-hundred.patch",
    "0101-demo-topic-add-a-module.patch",
    "0200-second-return-nine-hundred.patch",
)


#: As a maintainer would commit pins and stacks, with their bytes as they are.
_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "commit.cleanup": "verbatim",
    "commit.gpgSign": "false",
    "commit.template": "",
    "commit.verbose": "false",
    "user.name": "A",
    "user.email": "a@example.invalid",
}


def git_in(folder: Path, *words: str) -> str:
    settings = [word for key, value in _SETTINGS.items() for word in ("-c", f"{key}={value}")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", *settings, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit_project(project: Project, top: Path | None = None) -> str:
    """Commit pins and stacks to the repository at ``top`` and return the commit."""
    folder = top or project.root
    if not (folder / ".git").exists():
        git_in(folder, "init", "--quiet", "--template=")
    for path in (project.workspace.pin_file("demo"), project.series.parent):
        git_in(folder, "add", "--force", str(path))
    git_in(folder, "commit", "--quiet", "-m", "Change the stack")
    return git_in(folder, "rev-parse", "HEAD")


def compared(project: Project, *words: str) -> dict[str, Any]:
    """Return the comparison of the one target."""
    (target,) = project.ok("diff", *words, "--offline").report["targets"]
    result: dict[str, Any] = target["comparison"]
    return result


def actions(comparison: dict[str, Any]) -> dict[str, str]:
    return {patch["name"]: patch["action"] for patch in comparison["patches"]}


def test_the_same_version_does_not_differ(stacked: Project) -> None:
    commit = commit_project(stacked)
    comparison = compared(stacked, commit, ".")
    assert set(actions(comparison).values()) == {"unchanged"}
    assert (comparison["pin"], comparison["series"], comparison["reordered"]) == ([], [], False)
    assert "  the same stack\n" in stacked.ok("diff", "HEAD", "--offline").out


def test_changed_added_and_removed_patches(stacked: Project) -> None:
    commit_project(stacked)
    stacked.git("rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    stacked.edit("demo/core.py", "return 900\n", "return 901\n")
    stacked.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    stacked.edit("demo/core.py", "return 4\n", "return 400\n")
    stacked.commit(message("[Second] Return four hundred", topic="second"))
    stacked.ok("refresh", "--drop", SECOND)
    done = stacked.ok("diff", "HEAD", ".", "--offline")
    comparison = done.report["targets"][0]["comparison"]
    added = "0201-second-return-four-hundred.patch"
    assert actions(comparison) == {FIRST: "unchanged", THIRD: "changed", added: "added", SECOND: "removed"}
    changed = next(patch for patch in comparison["patches"] if patch["name"] == THIRD)
    assert (changed["old_position"], changed["new_position"]) == (3, 2)
    assert "-+    return 900" in changed["interdiff"]
    assert "++    return 901" in changed["interdiff"]
    assert f"  changed: {THIRD}: [Second] Return nine hundred\n" in done.out
    assert "    | + +    return 901\n" in done.out
    assert f"  removed: {SECOND}: [Core][New] Add a module\n" in done.out
    keys = [setting["key"] for setting in comparison["series"]]
    assert f"patches.{added}.test" in keys
    assert "topics.demo-topic.last" in keys


def test_a_message_alone_counts_as_a_change(stacked: Project) -> None:
    commit_project(stacked)
    text = message("[Second] Return nine hundred", topic="second", reason="It is needed even more.")
    stacked.git("commit", "--quiet", "--amend", "--file=-", stdin=text)
    stacked.ok("refresh")
    comparison = compared(stacked, "HEAD")
    assert actions(comparison)[THIRD] == "changed"
    difference = comparison["patches"][2]["interdiff"]
    assert "-    It is needed." in difference
    assert "+    It is needed even more." in difference


def test_a_new_order_is_seen(stacked: Project) -> None:
    commit_project(stacked)
    lines = stacked.series.read_text()
    head, *tables = lines.split("[[patches]]\n")
    stacked.series.write_text(
        head + "".join(f"[[patches]]\n{table.rstrip()}\n\n" for table in reversed(tables))
    )
    comparison = compared(stacked, "HEAD")
    assert comparison["reordered"]
    assert [patch["name"] for patch in comparison["patches"]] == [THIRD, SECOND, FIRST]


def test_a_renamed_patch_is_followed(stacked: Project) -> None:
    commit_project(stacked)
    new = "0205-second-nine.patch"
    stacked.patch_file(THIRD).rename(stacked.patch_file(new))
    stacked.series.write_text(stacked.series.read_text().replace(THIRD, new))
    comparison = compared(stacked, "HEAD")
    assert actions(comparison) == {FIRST: "unchanged", SECOND: "unchanged", new: "renamed"}
    assert comparison["patches"][2]["old_name"] == THIRD
    assert f"renamed: {new} (was {THIRD})" in stacked.ok("diff", "HEAD", "--offline").out


def move_to_next_release(project: Project) -> None:
    """Rewrite pin and patches for demo 2.0.0, in which everything stands three lines lower."""
    files = {**FILES, "demo/core.py": "#\n#\n#\n" + FILES["demo/core.py"]}
    path = project.root / "demo-2.0.0.tar.gz"
    make_sdist(path, {**files, **GENERATED}, top="demo-2.0.0")
    data = path.read_bytes()
    pin = project.workspace.pin_file("demo")
    text = project.pin_text(sha256_bytes(data), len(data)).replace("1.0.0", "2.0.0")
    pin.write_text(text)
    Base.ensure(project.workspace, load_pin(pin), path)
    shutil.rmtree(project.checkout)
    project.ok("apply", "--three-way")
    project.edit("demo/core.py", "return 900\n", "return 902\n")
    project.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    project.ok("refresh")


def test_stacks_of_two_releases_are_compared_on_their_own(stacked: Project) -> None:
    commit_project(stacked)
    move_to_next_release(stacked)
    done = stacked.ok("diff", "HEAD", "--offline")
    comparison = done.report["targets"][0]["comparison"]
    assert actions(comparison) == {FIRST: "moved", SECOND: "unchanged", THIRD: "changed"}
    assert [
        line for line in comparison["patches"][2]["interdiff"] if line[:1] in "+-" and "return" in line
    ] == [
        "-+    return 900",
        "++    return 902",
    ]
    assert {"key": "release", "old": "1.0.0", "new": "2.0.0"} in comparison["pin"]
    assert "  pin: release: 1.0.0 -> 2.0.0\n" in done.out
    assert "demo: 1.0.0+bw.0.s" in done.out


def test_releases_are_found_by_their_number(stacked: Project) -> None:
    stacked.ok("release", "--target", "demo")
    commit_project(stacked)
    first = stacked.stack.stack_id
    stacked.edit("demo/core.py", "return 900\n", "return 901\n")
    stacked.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    stacked.ok("refresh")
    commit_project(stacked)
    stacked.ok("release", "--target", "demo")
    (target,) = stacked.ok("diff", "1.0.0+bw.1", "1.0.0+bw.2", "--offline").report["targets"]
    assert target["old"]["stack_id"] == first
    assert (target["old"]["version"], target["new"]["version"]) == ("1.0.0+bw.1", "1.0.0+bw.2")
    assert target["new"]["commit"] is None
    assert actions(target["comparison"])[THIRD] == "changed"
    unreleased = f"1.0.0+bw.0.s{first[:8]}"
    assert stacked.run("diff", unreleased, ".", "--offline").code == 2


def test_a_number_is_looked_up_in_the_series_on_disk(stacked: Project) -> None:
    commit = commit_project(stacked)
    stacked.ok("release", "--target", "demo")
    stacked.edit("demo/core.py", "return 900\n", "return 901\n")
    stacked.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    stacked.ok("refresh")
    (target,) = stacked.ok("diff", "1.0.0+bw.1", ".", "--offline").report["targets"]
    assert target["old"]["commit"] == commit


def test_commits_from_before_the_stack_are_passed_over(stacked: Project) -> None:
    """The pin may be older than the series."""
    kept = stacked.series.rename(stacked.root.parent / "series.toml")
    commit_project(stacked)
    kept.rename(stacked.series)
    commit_project(stacked)
    done = stacked.run("diff", "1.0.0+bw.7", "--offline")
    assert (done.code, done.error["message"]) == (2, "no commit has the stack of 1.0.0+bw.7")


def test_a_stack_without_a_number_is_found_by_its_id(stacked: Project) -> None:
    commit_project(stacked)
    name = f"1.0.0+bw.0.s{stacked.stack.stack_id[:8]}"
    stacked.edit("demo/core.py", "return 900\n", "return 901\n")
    stacked.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    stacked.ok("refresh")
    (target,) = stacked.ok("diff", name, "worktree", "--offline").report["targets"]
    assert target["old"]["version"] == name
    assert target["old"]["commit"]


def test_a_target_that_only_one_version_has(stacked: Project) -> None:
    commit_project(stacked)
    make_target(stacked, "extra")
    done = stacked.ok("diff", "HEAD", "--offline")
    extra = next(item for item in done.report["targets"] if item["target"] == "extra")
    assert (extra["old"], extra["comparison"]) == (None, None)
    assert extra["new"]["release"] == "1.0.0"
    assert "extra: nothing -> 1.0.0+bw.0.s" in done.out
    (only,) = stacked.ok("diff", "HEAD", "--target", "demo", "--offline").report["targets"]
    assert only["target"] == "demo"


def test_what_does_not_exist_is_named(stacked: Project) -> None:
    done = stacked.run("diff", "HEAD", "--offline")
    assert done.code == 2
    assert "is not in a git repository" in done.error["message"]
    commit_project(stacked)
    assert "no revision nowhere" in stacked.run("diff", "nowhere", "--offline").error["message"]
    assert "no commit has the stack" in stacked.run("diff", "1.0.0+bw.7", "--offline").error["message"]
    assert stacked.run("diff", "HEAD", "--target", "absent", "--offline").code == 2
    assert stacked.run("diff", "--", "--output=x", "--offline").code == 2


def test_a_stack_that_does_not_apply_is_a_conflict(stacked: Project) -> None:
    commit_project(stacked)
    file = stacked.patch_file(THIRD)
    file.write_bytes(file.read_bytes().replace(b"-    return 9\n", b"-    return 8\n"))
    assert stacked.run("diff", "HEAD", "--offline").code == 5


def test_stacks_in_a_folder_of_a_larger_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    project = Project(outer / "inner", capsys)
    project.add_patches()
    commit_project(project, outer)
    assert set(actions(compared(project, "HEAD")).values()) == {"unchanged"}


def test_settings_name_what_differs_by_key() -> None:
    old = {"a": 1, "list": ["x", "y"], "wheels": [{"arch": "x86_64", "size": 1}], "gone": "z"}
    new = {"a": 2, "list": ["y", "w"], "wheels": [{"arch": "x86_64", "size": 2}], "empty": None}
    assert settings_between(old, new) == (
        Setting("a", "1", "2"),
        Setting("list[x]", "x", None),
        Setting("wheels[x86_64].size", "1", "2"),
        Setting("gone", "z", None),
        Setting("list[w]", None, "w"),
    )

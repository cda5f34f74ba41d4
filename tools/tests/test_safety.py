"""Nothing is lost: newer patch files, interruptions, other branches, hidden and ignored files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from stackproject import Project, make_target, message

from vllm_stack import checkout as checkout_module
from vllm_stack import git, refresh
from vllm_stack.checkout import Checkout
from vllm_stack.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = "0100-demo-topic-return-a-hundred.patch"
SECOND = "0101-demo-topic-add-a-module.patch"
THIRD = "0200-second-return-nine-hundred.patch"


def newer_stack(project: Project) -> dict[str, bytes]:
    """Let a colleague change the first patch; return the folder's files as pulled."""
    before = project.patches()
    project.git("tag", "mine")
    project.git("checkout", "--quiet", "--detach", "stack~2")
    project.edit("demo/core.py", "return 100\n", "return 111\n")
    project.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    project.git("cherry-pick", "stack~2..stack")
    project.git("checkout", "--quiet", "-B", "stack")
    project.ok("refresh")
    pulled = project.patches()
    for name, data in before.items():
        project.patch_file(name).write_bytes(data)
    project.ok("apply", "--force")
    for name, data in pulled.items():
        project.patch_file(name).write_bytes(data)
    return pulled


def test_refresh_does_not_undo_newer_patch_files(stacked: Project) -> None:
    pulled = newer_stack(stacked)
    done = stacked.run("refresh")
    assert (done.code, done.error["details"]) == (9, [FIRST, THIRD])
    assert "`apply` takes them over" in done.error["hint"]
    assert stacked.patches() == pulled
    stacked.ok("apply")
    assert "return 111" in (stacked.checkout / "demo/core.py").read_text()
    stacked.ok("refresh", "--check")


def test_refresh_does_not_bring_back_a_dropped_patch(stacked: Project) -> None:
    stacked.patch_file(THIRD).unlink()
    text = stacked.series.read_text()
    stacked.series.write_text(text[: text.rindex("[[patches]]")])
    done = stacked.run("refresh")
    assert done.code == 9
    assert done.error["details"] == [THIRD]
    assert not stacked.patch_file(THIRD).exists()


def test_a_pulled_patch_is_not_to_be_dropped(stacked: Project) -> None:
    pulled = newer_stack(stacked)
    del pulled
    stacked.patch_file("0102-demo-topic-pulled.patch").write_bytes(
        stacked.patch_file(SECOND).read_bytes().replace(b"Add a module", b"Pulled")
    )
    entry = '\n[[patches]]\nfile = "0102-demo-topic-pulled.patch"\ntopic = "demo-topic"\ntest = "true"\n'
    stacked.series.write_text(stacked.series.read_text() + entry)
    done = stacked.run("refresh")
    assert done.code == 9
    assert "`apply` first" in done.error["hint"]


def test_an_apply_that_git_stopped_is_finished_by_the_next(stacked: Project) -> None:
    pulled = newer_stack(stacked)
    lock = stacked.checkout / ".git" / "index.lock"
    lock.touch()
    done = stacked.run("apply")
    assert done.code == 9
    assert "index.lock" in " ".join(done.error["details"])
    lock.unlink()
    refused = stacked.run("refresh")
    assert (refused.code, refused.error["hint"]) == (9, "run `apply` again to finish it")
    assert stacked.patches() == pulled
    stacked.ok("apply")
    stacked.ok("refresh", "--check")
    assert "return 111" in (stacked.checkout / "demo/core.py").read_text()


@pytest.mark.parametrize("files_written", [0, 1])
@pytest.mark.parametrize("branch_moved", [False, True])
def test_an_apply_killed_anywhere_is_finished_by_the_next(
    stacked: Project, monkeypatch: pytest.MonkeyPatch, files_written: int, branch_moved: bool
) -> None:
    newer_stack(stacked)

    def die_midway(checkout: Checkout, commit: str, *, force: bool) -> None:
        checkout_module._write_state(checkout.folder, replace(checkout.state, pending=commit))
        if files_written:
            (checkout.folder / "demo/core.py").write_bytes(checkout.git.blob(commit, "demo/core.py"))
        if branch_moved:
            checkout.git.run("update-ref", "refs/heads/stack", commit)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkout, "move_to", die_midway)
        assert stacked.run("apply").code == 130
    stacked.ok("apply")
    assert stacked.git("status", "--porcelain") == ""
    assert "return 111" in (stacked.checkout / "demo/core.py").read_text()


def test_work_added_after_an_interruption_is_not_taken_for_the_tools(
    stacked: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer_stack(stacked)
    with monkeypatch.context() as patch:
        patch.setattr(git.Git, "run", _fail_on_checkout(git.Git.run))
        assert stacked.run("apply").code == 130
    stacked.edit("demo/other.py", "1", "mine")
    done = stacked.run("apply")
    assert (done.code, done.error["details"]) == (9, [" M demo/other.py"])


def _fail_on_checkout(run: Callable[..., Any]) -> Callable[..., Any]:
    def failing(self: git.Git, *words: str, **options: Any) -> Any:
        if words[0] == "checkout":
            raise KeyboardInterrupt
        return run(self, *words, **options)

    return failing


def test_commits_of_the_branch_are_kept_when_head_is_elsewhere(stacked: Project) -> None:
    stacked.edit("demo/other.py", "1", "2")
    precious = stacked.commit(message("[Core] Precious"))
    stacked.git("checkout", "--quiet", "--detach", "HEAD^")
    done = stacked.run("apply")
    assert done.code == 9
    assert "[Core] Precious" in done.error["details"][0]
    assert stacked.git("rev-parse", "stack").strip() == precious
    saved = stacked.ok("apply", "--force").report["targets"][0]["saved"]
    assert precious in stacked.git("rev-list", saved)


def test_force_keeps_everything_and_leaves_a_clean_checkout(stacked: Project) -> None:
    stacked.write("demo/untracked.py", "x = 1\n")
    stacked.write("demo/staged.py", "only in the index\n")
    stacked.git("add", "--force", "demo/staged.py")
    (stacked.checkout / "demo/staged.py").unlink()
    saved = stacked.ok("apply", "--force").report["targets"][0]["saved"]
    assert stacked.git("show", f"{saved}:demo/untracked.py") == "x = 1\n"
    assert stacked.git("show", f"{saved}^2:demo/staged.py") == "only in the index\n"
    assert stacked.git("status", "--porcelain") == ""
    stacked.ok("apply")
    stacked.ok("refresh")


def test_saved_work_never_takes_a_used_number(stacked: Project) -> None:
    refs = []
    for number in range(3):
        stacked.edit("demo/other.py", "VALUE = 1", f"VALUE = 10{number}")
        refs.append(stacked.ok("apply", "--force").report["targets"][0]["saved"])
        if number == 1:
            stacked.git("update-ref", "-d", refs[0])
    assert refs == [f"refs/stack/saved/{number}" for number in (1, 2, 3)]


def test_an_ignored_file_is_not_overwritten(stacked: Project) -> None:
    stacked.git("checkout", "--quiet", "-B", "stack", "refs/stack/base")
    state = Checkout.find(stacked.checkout)
    assert state is not None
    state.record(stacked.git("rev-parse", "HEAD").strip(), stacked.stack, {})
    (stacked.checkout / ".git" / "info" / "exclude").write_text("demo/new.py\n")
    stacked.write("demo/new.py", "mine\n")
    done = stacked.run("apply")
    assert done.code == 9
    assert "demo/new.py" in " ".join(done.error["details"])
    assert (stacked.checkout / "demo/new.py").read_text() == "mine\n"


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_changes_that_git_does_not_see_are_work_too(stacked: Project, flag: str) -> None:
    stacked.git("update-index", flag, "demo/other.py")
    stacked.edit("demo/other.py", "1", "mine")
    for command in ("apply", "refresh"):
        done = stacked.run(command)
        assert (done.code, done.error["details"]) == (9, ["assume-unchanged or skip-worktree: demo/other.py"])


def test_no_target_is_refreshed_when_one_is_refused(stacked: Project) -> None:
    make_target(stacked, "other")
    stacked.ok("apply")
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] Wanted"))
    (stacked.root / "upstream" / "other" / "demo" / "untracked.py").write_text("x\n")
    before = stacked.patches()
    done = stacked.run("refresh")
    assert (done.code, done.error["details"]) == (9, ["?? demo/untracked.py"])
    assert stacked.patches() == before


@pytest.mark.parametrize(
    "text",
    [
        message("[Core] Two  spaces"),
        message("[Core] Cut", reason="First.\n---\nSecond."),
        message("[Core] Cut", reason="First.\ndiff --git a/x b/x\nSecond."),
        message("[Core] Cut", reason="First.\nIndex: x\nSecond."),
        message("[Core] Sent", reason="From: Somebody <else@example.invalid>\n\nReason."),
    ],
)
def test_refresh_takes_only_what_comes_back_the_same(stacked: Project, text: str) -> None:
    before = stacked.patches()
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(text)
    done = stacked.run("refresh")
    assert done.code == 6
    assert "does not survive as a patch file" in done.error["message"]
    assert stacked.patches() == before


@pytest.mark.parametrize(
    "name", ["John Q. Public", "Public, John", "A (B) C", "dependabot[bot]", "Ünïcödé Näme"]
)
def test_any_author_is_taken_and_checked(stacked: Project, name: str) -> None:
    stacked.edit("demo/other.py", "1", "2")
    text = message("[Core] Authored", Signed_off_by=f"{name} <a@example.invalid>")
    stacked.git("add", "--all", "--force")
    author = f"{name} <a@example.invalid>"
    stacked.git("commit", "--quiet", f"--author={author}", "--file=-", stdin=text)
    stacked.ok("refresh")
    stacked.ok("refresh", "--check")
    assert stacked.stack.patches[-1].author == author


def test_an_absorbed_patch_in_the_middle_does_not_stop_the_rest(stacked: Project) -> None:
    copy = "0102-demo-topic-again.patch"
    data = stacked.patch_file(FIRST).read_bytes().replace(b"Return a hundred", b"Again")
    stacked.patch_file(copy).write_bytes(data)
    text = stacked.series.read_text()
    entry = f'[[patches]]\nfile = "{copy}"\ntopic = "demo-topic"\ntest = "true"\n\n'
    place = text.index(f'[[patches]]\nfile = "{SECOND}"')
    stacked.series.write_text(text[:place] + entry + text[place:])
    done = stacked.run("apply")
    assert done.code == 5
    outcomes = ["strict", "absorbed", "strict", "strict"]
    names = [FIRST, copy, SECOND, THIRD]
    assert done.error["details"] == [f"{name}: {end}" for name, end in zip(names, outcomes, strict=True)]
    assert f"`apply --target demo --three-way --drop {copy}`" in done.error["hint"]
    done = stacked.ok("apply", "--three-way", "--drop", copy)
    assert [patch["outcome"] for patch in done.report["targets"][0]["patches"]] == outcomes
    assert f"left out: `refresh --target demo --drop {copy}` takes it off the stack" in done.out
    assert "return 900" in (stacked.checkout / "demo/core.py").read_text()
    stacked.ok("refresh", "--target", "demo", "--drop", copy)
    assert [patch.name for patch in stacked.stack.patches] == [FIRST, SECOND, THIRD]
    stacked.ok("refresh", "--check")


def test_a_patch_that_applies_cannot_be_left_out_by_apply(stacked: Project) -> None:
    stacked.ok("apply")
    before = stacked.git("rev-parse", "HEAD")
    done = stacked.run("apply", "--drop", "0999-nothing.patch")
    assert done.code == 2
    assert done.error["message"] == "--drop 0999-nothing.patch: the stack of demo has no such patch"
    stacked.ok("apply", "--three-way", "--drop", FIRST)
    assert stacked.git("rev-parse", "HEAD") == before


@pytest.mark.parametrize("command", ["apply", "refresh"])
def test_drop_asks_which_target_is_meant(stacked: Project, command: str) -> None:
    make_target(stacked, "other")
    done = stacked.run(command, "--drop", FIRST)
    assert done.code == 2
    assert done.error["message"] == "--drop needs one --target"
    assert done.error["hint"] == "--target demo or --target other"


def test_an_interrupted_drop_is_finished_by_the_same_command(
    stacked: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked.git("reset", "--quiet", "--hard", "HEAD^")
    words = ("refresh", "--target", "demo", "--drop", THIRD)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(refresh, "remove_file", die)
        assert stacked.run(*words).code == 130
    assert stacked.patch_file(THIRD).exists()
    stacked.ok(*words)
    assert not stacked.patch_file(THIRD).exists()
    stacked.ok("lint")


def test_numbers_are_not_given_twice(stacked: Project) -> None:
    stacked.git("reset", "--quiet", "--hard", "HEAD^")
    stacked.ok("refresh", "--target", "demo", "--drop", THIRD)
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Second] Other thing", topic="second"))
    stacked.ok("refresh")
    assert stacked.stack.patches[-1].name == "0201-second-other-thing.patch"
    assert stacked.series.read_text().count("last = 200") == 1


def test_a_file_that_is_not_listed_is_not_overwritten(stacked: Project) -> None:
    forgotten = stacked.patch_file("0102-demo-topic-more.patch")
    forgotten.write_bytes(b"precious")
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] More"))
    done = stacked.run("refresh")
    assert done.code == 6
    assert "is not in the series" in done.error["message"]
    assert forgotten.read_bytes() == b"precious"


def test_comments_stay_with_their_patches(stacked: Project) -> None:
    text = stacked.series.read_text()
    for name in (FIRST, SECOND, THIRD):
        text = text.replace(f'file = "{name}"', f'# why {name}\nfile = "{name}"')
    stacked.series.write_text(text)
    stacked.git("rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    stacked.ok("refresh", "--target", "demo", "--drop", SECOND)
    after = stacked.series.read_text()
    assert f'# why {THIRD}\nfile = "{THIRD}"' in after
    assert f'# why {FIRST}\nfile = "{FIRST}"' in after
    assert SECOND not in after
    assert "\n\n\n" not in after


def test_a_full_disk_is_an_error_and_nothing_is_lost(
    stacked: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stacked.patches()
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] More"))
    folder = stacked.series.parent
    away = folder.with_name("away")
    shutil.move(folder, away)
    folder.symlink_to("/proc/self/fdinfo", target_is_directory=True)
    done = stacked.run("refresh")
    folder.unlink()
    shutil.move(away, folder)
    assert done.code == 2
    assert done.error["message"]
    assert stacked.patches() == before


def test_a_report_that_cannot_be_written_does_not_hide_the_error(stacked: Project) -> None:
    file = stacked.patch_file(FIRST)
    file.write_bytes(file.read_bytes().replace(b"-    return 1\n", b"-    return 11\n"))
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "apply",
                "--root",
                str(stacked.root),
                "--cache-dir",
                str(stacked.root / "cache"),
                "--json",
                "/proc/no",
            ]
        )
    assert stop.value.code == 5
    text = stacked.capsys.readouterr().err
    assert "cannot write the report" in text
    assert f"{FIRST}: conflict" in text


def test_a_git_that_is_too_old_is_refused(
    stacked: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\necho git version 2.20.1\n")
    fake.chmod(0o755)
    git.git_program.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        done = stacked.run("status")
    git.git_program.cache_clear()
    assert (done.code, done.error["message"]) == (2, "git 2.20.1 is too old")


def test_only_a_stack_that_applies_is_released(stacked: Project) -> None:
    file = stacked.patch_file(FIRST)
    file.write_bytes(file.read_bytes().replace(b"-    return 1\n", b"-    return 11\n"))
    assert stacked.run("release", "--target", "demo").code == 5


@pytest.mark.parametrize("folder", ["[red]", "[/x]"])
def test_paths_that_look_like_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    project = Project(tmp_path / folder, capsys)
    project.add_patches()
    assert f"in {project.checkout}" in " ".join(project.ok("apply").out.split())


def test_patch_in_the_way_of_a_folder(stacked: Project) -> None:
    stacked.patch_file(FIRST).unlink()
    stacked.patch_file(FIRST).mkdir()
    done = stacked.run("lint")
    assert (done.code, done.error["kind"]) == (2, "usage")
    assert stacked.run("refresh", "--test", " ").code == 2

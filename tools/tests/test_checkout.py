"""apply, refresh and status on real repositories."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from stackproject import FILES, Project, message

from vllm_stack.git import Git

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [
    "0100-demo-topic-return-a-hundred.patch",
    "0101-demo-topic-add-a-module.patch",
    "0200-second-return-nine-hundred.patch",
]


def test_a_stack_is_written_in_order_with_numbers_of_its_topics(stacked: Project) -> None:
    assert [patch.name for patch in stacked.stack.patches] == NAMES
    assert stacked.series.read_text().startswith("# The order of the demo stack.\n")
    for name in NAMES:
        data = stacked.patch_file(name).read_bytes()
        assert data.startswith(b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n")
        assert b"\nSubject: [" in data
        assert b"\r" not in data
        assert b"\ndiff --git a/" in data
    assert stacked.ok("lint").report["targets"][0]["findings"] == []


def test_applying_twice_gives_the_same_commits(
    stacked: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = stacked.ok("apply").report["targets"][0]
    other = Project(tmp_path / "other", capsys)
    for name, data in stacked.patches().items():
        other.patch_file(name).write_bytes(data)
    second = other.ok("apply").report["targets"][0]
    assert first["head"] == second["head"]
    assert [patch["commit"] for patch in first["patches"]] == [patch["commit"] for patch in second["patches"]]
    assert {patch["outcome"] for patch in second["patches"]} == {"strict"}
    assert (other.checkout / "demo/new.py").read_bytes() == b"NEW = True\n"


def test_the_base_does_not_depend_on_the_users_configuration(project: Project) -> None:
    # Recorded once from a plain configuration; the archive's own time stamps play no part.
    git = project.base.git
    assert git.tree(project.base.commit) == "646efededde8834551f03cff0219f4c411820bea"
    assert git.blob(project.base.commit, "demo/other.py") == FILES["demo/other.py"].encode()
    paths = git.run("ls-tree", "-r", "--name-only", project.base.commit).lines
    assert paths == sorted(FILES)


def test_the_checkout_has_upstreams_bytes(project: Project) -> None:
    project.ok("apply")
    for path, text in FILES.items():
        assert (project.checkout / path).read_bytes() == text.encode()
    assert project.git("status", "--porcelain") == ""


def test_refresh_check_passes_and_writes_nothing(stacked: Project) -> None:
    before = stacked.patches()
    report = stacked.ok("refresh", "--check").report
    assert [file["action"] for file in report["targets"][0]["files"]] == ["same"] * 3
    assert stacked.patches() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"@@ def function_0():", b"@@ def function_zero():"),
        (b"It is needed.", b"It is  needed. "),
        (b"Date: ", b"Date:  "),
    ],
)
def test_refresh_check_finds_a_byte_that_differs(stacked: Project, old: bytes, new: bytes) -> None:
    file = stacked.patch_file(NAMES[0])
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    before = stacked.patches()
    done = stacked.run("refresh", "--check")
    assert done.code == 6
    assert done.error["details"][0] == f"demo: {NAMES[0]} is not what re-exporting it gives"
    assert stacked.patches() == before


def test_a_fixup_changes_its_own_patch_alone(stacked: Project) -> None:
    before = stacked.patches()
    target = stacked.git("log", "--format=%H", "--grep=Add a module").strip()
    stacked.edit("demo/new.py", "True", "False")
    stacked.git("commit", "--all", f"--fixup={target}")
    refused = stacked.run("refresh")
    assert (refused.code, refused.report["error"]["kind"]) == (9, "work-in-progress")
    assert "fixup! [Core][New] Add a module" in refused.err
    stacked.git("rebase", "--interactive", "--autosquash", "refs/stack/base")
    actions = {file["name"]: file["action"] for file in stacked.ok("refresh").report["targets"][0]["files"]}
    assert actions == dict(zip(NAMES, ["unchanged", "changed", "unchanged"], strict=True))
    after = stacked.patches()
    assert [name for name in NAMES if after[name] != before[name]] == [NAMES[1]]
    assert b"+NEW = False" in after[NAMES[1]]


def test_a_contentless_change_touches_no_file(stacked: Project) -> None:
    before = {path: path.stat().st_mtime_ns for path in stacked.series.parent.iterdir()}
    stacked.git("rebase", "--force-rebase", "--ignore-date", "refs/stack/base")
    report = stacked.ok("refresh").report["targets"][0]
    assert [file["action"] for file in report["files"]] == ["unchanged"] * 3
    assert not report["written"]
    assert {path: path.stat().st_mtime_ns for path in stacked.series.parent.iterdir()} == before
    stacked.ok("refresh", "--check")


def test_a_patch_keeps_its_name_when_its_subject_changes(stacked: Project) -> None:
    stacked.git("commit", "--amend", "--file=-", stdin=message("[Second] Say it otherwise", topic="second"))
    stacked.ok("refresh")
    assert [patch.name for patch in stacked.stack.patches] == NAMES
    assert stacked.stack.patches[2].subject == "[Second] Say it otherwise"


def test_new_patches_get_the_next_number_and_keep_comments(stacked: Project) -> None:
    text = stacked.series.read_text().replace("[[patches]]", "[[patches]]\n# why it is first", 1)
    stacked.series.write_text(text)
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] " + "A very long subject that goes on " * 2 + "and on"))
    stacked.ok("refresh", "--test", "python -m pytest tests/test_core.py")
    entry = stacked.stack.series.patches[3]
    assert entry.file == "0102-demo-topic-a-very-long-subject-that-goes-on-a-very.patch"
    assert entry.test == "python -m pytest tests/test_core.py"
    assert "# why it is first" in stacked.series.read_text()
    stacked.ok("refresh", "--check")


def test_refresh_refuses_uncommitted_work(stacked: Project) -> None:
    before = stacked.patches()
    stacked.write("demo/untracked.py", "x = 1\n")
    stacked.edit("demo/other.py", "1", "2")
    done = stacked.run("refresh")
    assert done.code == 9
    assert sorted(done.error["details"]) == [" M demo/other.py", "?? demo/untracked.py"]
    assert stacked.patches() == before
    assert (stacked.checkout / "demo/untracked.py").exists()


def test_refresh_refuses_an_empty_checkout(stacked: Project) -> None:
    before = stacked.patches()
    stacked.git("reset", "--hard", "refs/stack/base")
    done = stacked.run("refresh")
    assert done.code == 9
    assert "would empty the stack" in done.error["message"]
    assert stacked.patches() == before


def test_refresh_refuses_when_a_patch_would_vanish(stacked: Project) -> None:
    before = stacked.patches()
    stacked.git("reset", "--hard", "HEAD^")
    done = stacked.run("refresh")
    assert (done.code, done.error["details"]) == (9, [NAMES[2]])
    assert stacked.patches() == before
    assert stacked.run("refresh", "--drop", "0999-no.patch", "--target", "demo").code == 2
    report = stacked.ok("refresh", "--drop", NAMES[2], "--target", "demo").report
    assert report["targets"][0]["files"][-1] == {"name": NAMES[2], "action": "dropped", "commit": None}
    assert sorted(stacked.patches()) == [*NAMES[:2], "series.toml"]
    assert [patch.name for patch in stacked.stack.patches] == NAMES[:2]


def test_refresh_refuses_a_commit_that_changes_nothing(stacked: Project) -> None:
    before = stacked.patches()
    stacked.git("commit", "--allow-empty", "--quiet", "--file=-", stdin=message("[Core] Nothing"))
    done = stacked.run("refresh")
    assert done.code == 9
    assert "[Core] Nothing" in done.error["details"][0]
    assert stacked.patches() == before


@pytest.mark.parametrize("operation", ["rebase", "cherry-pick", "merge"])
def test_refresh_refuses_during_a_git_operation(stacked: Project, operation: str) -> None:
    before = stacked.patches()
    stacked.git("checkout", "--quiet", "-b", "side", "refs/stack/base")
    stacked.edit("demo/core.py", "return 1\n", "return -1\n")
    stacked.commit(message("[Core] Contradict"))
    words = {
        "rebase": ["rebase", "stack"],
        "cherry-pick": ["cherry-pick", "stack~2"],
        "merge": ["merge", "stack"],
    }
    with pytest.raises(AssertionError, match="CONFLICT"):
        stacked.git(*words[operation])
    for command in (("refresh",), ("apply",), ("apply", "--force")):
        done = stacked.run(*command)
        assert done.code == 9
        assert operation in done.error["message"]
    assert stacked.patches() == before


def test_refresh_refuses_merge_commits(stacked: Project) -> None:
    stacked.git("checkout", "--quiet", "-b", "side", "refs/stack/base")
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] Side"))
    stacked.git("checkout", "--quiet", "stack")
    stacked.git("merge", "--quiet", "--no-edit", "side")
    done = stacked.run("refresh")
    assert (done.code, done.error["message"]) == (9, "the checkout holds merge commits")


def test_refresh_refuses_commits_that_lint_refuses(stacked: Project) -> None:
    before = stacked.patches()
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] No drop rule", Drop_When=""))
    done = stacked.run("refresh")
    assert done.code == 6
    assert done.error["details"] == [
        "0102-demo-topic-no-drop-rule.patch: trailer Drop-When is missing [trailer-missing]"
    ]
    assert stacked.patches() == before


def test_refresh_needs_a_topic_of_the_series(stacked: Project) -> None:
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] Whose", topic="unknown"))
    done = stacked.run("refresh")
    assert done.code == 6
    assert "demo-topic, second" in done.error["hint"]


def test_refresh_without_a_checkout(project: Project) -> None:
    assert project.run("refresh").code == 9
    assert project.run("refresh", "--target", "demo").code == 9


def test_apply_refuses_commits_that_are_in_no_patch(stacked: Project) -> None:
    stacked.edit("demo/other.py", "1", "2")
    commit = stacked.commit(message("[Core] Precious"))
    done = stacked.run("apply")
    assert done.code == 9
    assert "[Core] Precious" in done.error["details"][0]
    assert stacked.git("rev-parse", "HEAD").strip() == commit


def test_apply_refuses_uncommitted_work_and_force_keeps_it(stacked: Project) -> None:
    stacked.write("demo/untracked.py", "x = 1\n")
    stacked.edit("demo/other.py", "1", "2")
    done = stacked.run("apply")
    assert done.code == 9
    assert sorted(done.error["details"]) == [" M demo/other.py", "?? demo/untracked.py"]
    saved = stacked.ok("apply", "--force").report["targets"][0]["saved"]
    assert saved == "refs/stack/saved/1"
    assert stacked.git("show", f"{saved}:demo/untracked.py") == "x = 1\n"
    assert stacked.git("show", f"{saved}:demo/other.py") == "VALUE = 2\n"
    assert (stacked.checkout / "demo/other.py").read_text() == "VALUE = 1\n"


def test_apply_does_not_touch_a_folder_that_is_not_its_own(project: Project) -> None:
    project.checkout.mkdir()
    (project.checkout / "mine.txt").write_text("mine")
    done = project.run("apply")
    assert done.code == 9
    assert (project.checkout / "mine.txt").read_text() == "mine"


def test_apply_says_what_became_of_every_patch(stacked: Project) -> None:
    file = stacked.patch_file(NAMES[0])
    file.write_bytes(file.read_bytes().replace(b"-    return 1\n", b"-    return 11\n"))
    head = stacked.git("rev-parse", "HEAD")
    done = stacked.run("apply")
    assert done.code == 5
    assert [line for line in done.error["details"] if not line.startswith(" ")] == [
        f"{NAMES[0]}: conflict",
        f"{NAMES[1]}: strict",
        f"{NAMES[2]}: strict",
    ]
    assert "    error: demo/core.py: patch does not apply" in done.error["details"]
    assert stacked.git("rev-parse", "HEAD") == head


def test_apply_reports_an_absorbed_patch(stacked: Project) -> None:
    copy = stacked.patch_file("0102-demo-topic-again.patch")
    data = stacked.patch_file(NAMES[0]).read_bytes().replace(b"Return a hundred", b"Again")
    copy.write_bytes(data)
    text = stacked.series.read_text()
    entry = '[[patches]]\nfile = "0102-demo-topic-again.patch"\ntopic = "demo-topic"\ntest = "true"\n'
    stacked.series.write_text(f"{text}\n{entry}")
    done = stacked.run("apply")
    assert done.code == 5
    assert "0102-demo-topic-again.patch: absorbed" in done.error["details"]


def test_apply_refuses_an_offset_and_three_way_takes_it(stacked: Project) -> None:
    file = stacked.patch_file(NAMES[2])
    data = file.read_bytes()
    assert b"@@ -35,7 +35,7 @@" in data
    file.write_bytes(data.replace(b"@@ -35,7 +35,7 @@", b"@@ -32,7 +32,7 @@"))
    done = stacked.run("apply")
    assert done.code == 5
    assert f"{NAMES[2]}: offset" in done.error["details"]
    outcomes = [
        patch["outcome"] for patch in stacked.ok("apply", "--three-way").report["targets"][0]["patches"]
    ]
    assert outcomes == ["strict", "strict", "offset"]
    stacked.ok("refresh")
    assert file.read_bytes() == data


def test_fuzz_is_refused(stacked: Project) -> None:
    file = stacked.patch_file(NAMES[2])
    data = file.read_bytes()
    file.write_bytes(data.replace(b" def function_9():\n", b" def function_nine():\n", 1))
    assert stacked.run("apply").code == 5


def test_status_tells_checkout_and_patches_apart(stacked: Project) -> None:
    state = stacked.ok("status").report["targets"][0]["checkout"]
    assert (state["newer_than_patches"], state["older_than_patches"], state["uncommitted"]) == (
        False,
        False,
        [],
    )
    stacked.edit("demo/other.py", "1", "2")
    assert stacked.ok("status").report["targets"][0]["checkout"]["uncommitted"] == [" M demo/other.py"]
    stacked.commit(message("[Core] More"))
    assert stacked.ok("status").report["targets"][0]["checkout"]["newer_than_patches"]


def test_a_damaged_base_says_what_to_do(project: Project) -> None:
    assert project.base.git.git_dir is not None
    (project.base.git.git_dir / "packed-refs").unlink(missing_ok=True)
    for ref in (project.base.git.git_dir / "refs").rglob("base"):
        ref.unlink()
    done = project.run("apply")
    assert done.code == 4
    assert "remove" in done.error["hint"]


def test_git_never_discovers_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, env={"PATH": "/usr/bin:/bin"})
    inside = tmp_path / "inside"
    inside.mkdir()
    assert Git.checkout(inside).run("status", check=False).returncode == 128


@pytest.mark.parametrize("line", ["---", "diff --git a/x b/x", "Index: x"])
def test_refresh_refuses_a_message_that_git_would_cut(stacked: Project, line: str) -> None:
    before = stacked.patches()
    stacked.edit("demo/other.py", "1", "2")
    stacked.commit(message("[Core] Cut", reason=f"First.\n{line}\nSecond."))
    done = stacked.run("refresh")
    assert done.code == 6
    assert "does not survive" in done.error["message"]
    assert stacked.patches() == before

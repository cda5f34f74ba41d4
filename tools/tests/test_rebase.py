"""``rebase-upstream`` from start to acceptance: where it stops, what it takes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from releaseproject import FIVE, Rebased, copy_of
from stackproject import CORE, FILES, Project, message

from vllm_stack.checkout import Checkout
from vllm_stack.pins import load_pin

if TYPE_CHECKING:
    from pathlib import Path

FIRST, MODULE, MIDDLE, NINE, LAST = FIVE
NEW_CORE = "# Upstream's new head.\n\n" + CORE.replace("return 5\n", "return 55\n")
RESOLVED = NEW_CORE.replace("return 1\n", "return 100\n").replace("return 55\n", "return 500 + 55\n")


@pytest.fixture
def rebased(five: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Rebased:
    """Five patches, of which the one in the middle conflicts with release 2.0.0."""
    rebased = Rebased.make(copy_of(five, tmp_path / "a stack", capsys))
    rebased.upstream.release("2.0.0", {**FILES, "demo/core.py": NEW_CORE})
    return rebased


def release(rebased: Rebased, **files: str | None) -> None:
    """Publish 2.0.0 with changed files: ``demo__core`` names demo/core.py; None removes one."""
    content: dict[str, str] = dict(FILES)
    for name, text in files.items():
        path = f"{name.replace('__', '/')}.py"
        if text is None:
            del content[path]
        else:
            content[path] = text
    rebased.upstream.release("2.0.0", content)


def resolve(rebased: Rebased) -> None:
    """Resolve the conflict of the patch in the middle as a person would."""
    rebased.write("demo/core.py", RESOLVED)


def test_a_stack_that_does_not_apply_to_its_own_release_is_not_replayed(rebased: Rebased) -> None:
    path = rebased.project.patch_file(NINE)
    path.write_bytes(path.read_bytes().replace(b"-    return 9\n", b"-    return 8\n"))
    done = rebased.run("2.0.0", "--dry-run")
    assert done.code == 5
    assert done.error["message"] == "the stack of demo does not apply to its own release, 1.0.0"
    outcomes = [line for line in done.error["details"] if not line.startswith(" ")]
    assert outcomes == [f"{name}: {'conflict' if name == NINE else 'strict'}" for name in FIVE]


def test_dry_run_reports_every_patch_and_changes_nothing(rebased: Rebased) -> None:
    before = rebased.everything()
    done = rebased.run("2.0.0", "--dry-run")
    assert done.code == 5
    assert rebased.verdicts(done) == ["clean", "clean", "conflict", "clean", "clean"]
    assert [patch["outcome"] for patch in done.report["patches"]] == [
        "offset",
        "strict",
        "conflict",
        "offset",
        "strict",
    ]
    assert done.error["details"] == [f"{MIDDLE}: conflict"]
    assert rebased.everything() == before
    assert not rebased.tree.parent.exists()
    assert f"conflict        {MIDDLE}" in done.out


def test_a_clean_rebase_is_accepted_at_once(rebased: Rebased) -> None:
    release(rebased, demo__core="# Head.\n\n" + CORE)
    done = rebased.run("2.0.0")
    assert done.code == 0, done.err
    assert done.report["status"] == "accepted"
    assert rebased.verdicts(done) == ["clean"] * 5
    project = rebased.project
    assert project.stack.pin.release == "2.0.0"
    assert load_pin(project.workspace.pin_file("demo")) == rebased.upstream.candidates["2.0.0"].pin
    project.ok("lint")
    project.ok("refresh", "--check")
    assert project.git("status", "--porcelain") == ""
    assert "return 900" in (project.checkout / "demo/core.py").read_text()
    assert project.git("rev-parse", "stack") == project.git("rev-parse", "HEAD")
    project.ok("apply")
    assert not rebased.tree.parent.exists()
    # Patches that nothing happened to keep every byte.
    changed = {file["path"] for file in done.report["changed"]}
    assert f"patch-stack/demo/{LAST}" not in changed
    assert f"patch-stack/demo/{MIDDLE}" in changed


def test_a_conflict_in_the_middle_of_five(rebased: Rebased) -> None:
    before = rebased.everything()
    done = rebased.run("2.0.0")
    assert (done.code, done.report["status"], done.report["waits_at"]) == (5, "stopped", MIDDLE)
    assert rebased.verdicts(done) == ["clean", "clean", "conflict", "clean", "clean"]
    assert rebased.everything() == before
    text = (rebased.tree / "demo/core.py").read_text()
    assert (
        "<<<<<<< demo 2.0.0\n    return 55\n||||||| demo 1.0.0\n    return 5\n=======\n    return 500\n"
        in text
    )
    assert f">>>>>>> {MIDDLE}\n" in text
    assert "return 100\n" in text, "the patches before are there"
    refused = rebased.run("--continue")
    assert refused.code == 5
    assert [line.partition(": ")[0] for line in refused.error["details"]] == [
        f"demo/core.py:{number}" for number in (24, 26, 28, 30)
    ]
    resolve(rebased)
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    assert rebased.verdicts(done) == ["clean", "clean", "three-way", "clean", "clean"]
    project = rebased.project
    assert "return 500 + 55" in (project.checkout / "demo/core.py").read_text()
    assert "+    return 500 + 55" in project.patch_file(MIDDLE).read_text()
    assert [patch.name for patch in project.stack.patches] == FIVE
    project.ok("lint")
    project.ok("refresh", "--check")
    assert project.series.read_text().startswith("# The order of the demo stack.\n")


def test_git_add_and_a_commit_of_ones_own_are_fine(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    text = message("[Core] Return five hundred", reason="It is needed, on top of upstream's.")
    rebased.git("add", "demo/core.py")
    rebased.git("commit", "--quiet", "--message", text)
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    patch = next(patch for patch in rebased.project.stack.patches if patch.name == MIDDLE)
    assert patch.message.startswith("It is needed, on top of upstream's.\n")
    assert patch.author == "Contributor <contributor@example.invalid>"


def test_a_commit_message_that_lint_refuses_is_refused_there(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    rebased.git("commit", "--quiet", "--all", "--message", "wip")
    done = rebased.run("--continue")
    assert done.code == 6
    assert any("subject is not" in line for line in done.error["details"])
    rebased.git("commit", "--quiet", "--amend", "--message", message("[Core] Return five hundred"))
    assert rebased.run("--continue").code == 0


def test_two_commits_are_refused(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    rebased.git("commit", "--quiet", "--all", "--message", "one")
    rebased.write("demo/other.py", "VALUE = 11\n")
    rebased.git("commit", "--quiet", "--all", "--message", "two")
    done = rebased.run("--continue")
    assert done.code == 9
    assert "2 commits" in done.error["message"]


def test_a_strange_file_is_refused_until_it_is_added(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    rebased.write("demo/extra.py", "EXTRA = 1\n")
    done = rebased.run("--continue")
    assert (done.code, done.error["details"]) == (9, ["demo/extra.py"])
    rebased.git("add", "--force", "demo/extra.py")
    assert rebased.run("--continue").code == 0
    patch = next(patch for patch in rebased.project.stack.patches if patch.name == MIDDLE)
    assert patch.paths == ("demo/core.py", "demo/extra.py")


def test_a_second_run_is_refused_while_one_is_open(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    shown = rebased.project.ok("status")
    assert f"rebase to 2.0.0 waits at {MIDDLE}" in " ".join(shown.out.split())
    state = (rebased.tree.parent / "state.json").read_bytes()
    done = rebased.run("2.0.0")
    assert done.code == 9
    assert done.error["details"] == [f"it waits at {MIDDLE}"]
    assert (rebased.tree.parent / "state.json").read_bytes() == state
    # Asking what would happen is not a second run.
    assert rebased.run("2.0.0", "--dry-run").code == 5


def test_abort_restores_every_byte(rebased: Rebased) -> None:
    before = rebased.everything()
    rebased.run("2.0.0")
    resolve(rebased)
    done = rebased.run("--abort")
    assert (done.code, done.report["status"]) == (0, "aborted")
    assert rebased.everything() == before
    assert not rebased.tree.parent.exists()
    assert rebased.run("--abort").code == 2
    assert rebased.run("--continue").code == 2


def test_skip_takes_a_patch_off_with_its_reason(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    assert rebased.run("--skip", MIDDLE).code == 2
    assert rebased.run("--skip", NINE, "--reason", "no").code == 2
    done = rebased.run("--skip", MIDDLE, "--reason", "upstream returns 55, which is enough")
    assert done.code == 0, done.err
    project = rebased.project
    assert [patch.name for patch in project.stack.patches] == [FIRST, MODULE, NINE, LAST]
    assert not project.patch_file(MIDDLE).exists()
    (dropped,) = project.stack.series.dropped
    assert dropped.model_dump() == {
        "file": MIDDLE,
        "release": "2.0.0",
        "why": "skipped",
        "reason": "upstream returns 55, which is enough",
    }
    topic = project.stack.series.topic("demo-topic")
    assert topic is not None
    assert topic.last == 102
    project.ok("lint")
    project.ok("refresh", "--check")
    ruled = next(patch for patch in done.report["patches"] if patch["name"] == MIDDLE)
    assert (ruled["ruling"], ruled["commit"]) == ("skipped", None)


def test_an_absorbed_patch_stops_until_somebody_accepts_it(rebased: Rebased) -> None:
    release(rebased, demo__core=CORE.replace("return 5\n", "return 500\n"))
    done = rebased.run("2.0.0")
    assert (done.code, done.report["waits_at"]) == (5, MIDDLE)
    assert rebased.verdicts(done) == ["clean", "clean", "absorbed", "clean", "clean"]
    assert f"--accept-absorbed {MIDDLE}" in done.error["hint"]
    assert rebased.run("--continue").code == 5, "going on alone takes nothing off"
    done = rebased.run("--accept-absorbed", MIDDLE)
    assert done.code == 0, done.err
    assert [patch.name for patch in rebased.project.stack.patches] == [FIRST, MODULE, NINE, LAST]
    assert rebased.project.stack.series.dropped[0].why == "absorbed"


def test_decisions_can_be_given_at_the_start(rebased: Rebased) -> None:
    release(rebased, demo__core=CORE.replace("return 5\n", "return 500\n"))
    assert rebased.run("2.0.0", "--dry-run", "--accept-absorbed", MIDDLE).code == 0
    done = rebased.run("2.0.0", "--accept-absorbed", MIDDLE, "--skip", LAST, "--reason", "not needed")
    assert done.code == 0, done.err
    assert [patch.name for patch in rebased.project.stack.patches] == [FIRST, MODULE, NINE]
    # A patch that applies is not absorbed, whatever somebody says.
    assert rebased.run("2.0.0", "--accept-absorbed", FIRST).code == 2, "it is on 2.0.0 already"


def test_a_resolution_that_leaves_nothing_is_absorbed(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    rebased.write("demo/core.py", RESOLVED.replace("500 + 55", "55"))
    done = rebased.run("--continue")
    assert (done.code, done.report["waits_at"]) == (5, MIDDLE)
    assert rebased.verdicts(done)[2] == "absorbed"
    assert rebased.run("--accept-absorbed", MIDDLE).code == 0


def test_a_deleted_file_waits_for_a_word(rebased: Rebased) -> None:
    release(rebased, demo__other=None)
    done = rebased.run("2.0.0")
    assert (done.code, done.report["waits_at"]) == (5, LAST)
    done = rebased.run("--continue")
    assert (done.code, done.error["details"]) == (5, ["demo/other.py"])
    rebased.git("add", "--force", "demo/other.py")
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    assert "new file mode" in rebased.project.patch_file(LAST).read_text()


def test_a_deleted_file_may_stay_deleted(rebased: Rebased) -> None:
    release(rebased, demo__other=None)
    rebased.run("2.0.0")
    rebased.git("rm", "--quiet", "--force", "demo/other.py")
    done = rebased.run("--continue")
    assert rebased.verdicts(done)[4] == "absorbed"
    assert rebased.run("--accept-absorbed", LAST).code == 0


def test_our_new_file_exists_upstream_with_other_content(rebased: Rebased) -> None:
    rebased.upstream.release("2.0.0", {**FILES, "demo/new.py": "NEW = None\n"})
    done = rebased.run("2.0.0")
    assert (done.code, done.report["waits_at"]) == (5, MODULE)
    assert "<<<<<<< demo 2.0.0\n" in (rebased.tree / "demo/new.py").read_text()
    rebased.write("demo/new.py", "NEW = None or True\n")
    assert rebased.run("--continue").code == 0


def test_a_broken_contract_stops_like_a_conflict(rebased: Rebased) -> None:
    """The new module imports function_7, which upstream has renamed: no text conflicts."""
    release(rebased, demo__core=CORE.replace("def function_7(", "def function_seven("))
    done = rebased.run("2.0.0")
    assert (done.code, done.report["waits_at"]) == (5, MODULE)
    assert rebased.verdicts(done) == ["clean", "contract-broken", "clean", "clean", "clean"]
    assert "function_7" in json.dumps(done.report["patches"][1]["contracts"])
    assert rebased.run("--continue").code == 5, "nothing was amended"
    rebased.write("demo/new.py", "from demo.core import function_seven\n\nNEW = function_seven\n")
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    assert "function_seven" in rebased.project.patch_file(MODULE).read_text()
    rebased.project.ok("refresh", "--check")


def test_what_an_earlier_patch_would_have_brought_is_not_laid_on_upstream(rebased: Rebased) -> None:
    project = rebased.project
    project.edit("demo/core.py", "return 3\n", "return 300\n")
    project.write("demo/aid.py", "def aid() -> int:\n    return 1\n")
    project.commit(message("[Second] Aid", topic="second"))
    project.edit("demo/aid.py", "return 1\n", "return 2\n")
    project.commit(message("[Second] Aid twice", topic="second"))
    project.write("demo/user.py", "from demo.aid import aid\n\nUSED = aid()\n")
    project.commit(message("[Second] Be aided", topic="second"))
    project.ok("refresh")
    release(rebased, demo__core=CORE.replace("return 3\n", "return 33\n"))
    first, second, third = rebased.run("2.0.0", "--dry-run").report["patches"][-3:]
    assert [one["verdict"] for one in (first, second, third)] == ["conflict", "conflict", "contract-broken"]
    assert second["messages"][-1] == f"demo/aid.py: also changed by {first['name']}, which is not there"
    (finding,) = third["contracts"]
    assert finding["contract"] == "module demo.aid exists"
    patches = f"{first['name']}, {second['name']}"
    assert finding["found"] == (
        f"there is no such module; demo/aid.py is changed by {patches}, which are not there"
    )


def test_a_broken_contract_can_be_accepted_with_a_reason(rebased: Rebased) -> None:
    release(rebased, demo__core=CORE.replace("def function_7(", "def function_seven("))
    rebased.run("2.0.0")
    assert rebased.run("--accept-contracts", MODULE).code == 2
    done = rebased.run("--accept-contracts", MODULE, "--reason", "the name comes from elsewhere")
    assert done.code == 0, done.err
    assert done.report["patches"][1]["ruling"] == "accepted-contracts"
    assert [patch.name for patch in rebased.project.stack.patches] == FIVE


def take_back(rebased: Rebased, before: dict[str, bytes]) -> None:
    """Put the project's files, and the checkout, back by hand; what was recorded stays."""
    project = rebased.project
    for path, data in before.items():
        if path.startswith("patch-stack/") or path.endswith(".toml"):
            (project.root / path).write_bytes(data)
    project.ok("apply")


def resolutions(rebased: Rebased) -> list[Path]:
    """Return the project's recorded resolutions."""
    return sorted((rebased.project.series.parent / "resolutions").rglob("*.patch"))


def recorded(rebased: Rebased) -> dict[str, bytes]:
    """Resolve the conflict once, and go back to where the stack was before."""
    before = rebased.everything()
    rebased.run("2.0.0")
    resolve(rebased)
    assert rebased.run("--continue").code == 0
    take_back(rebased, before)
    return before


def test_a_resolution_is_recorded_and_used(rebased: Rebased) -> None:
    recorded(rebased)
    (path,) = resolutions(rebased)
    assert path.parent.parent.name == "1.0.0..2.0.0"
    rebased.project.ok("lint")
    done = rebased.run("2.0.0", "--dry-run")
    assert done.code == 0, done.err
    assert rebased.verdicts(done) == ["clean", "clean", "three-way", "clean", "clean"]
    assert done.report["patches"][2]["resolution"] == path.stem
    assert f"resolved as recorded {path.stem[:12]}" in done.out
    assert rebased.run("2.0.0").code == 0
    assert "return 500 + 55" in (rebased.project.checkout / "demo/core.py").read_text()
    assert resolutions(rebased) == [path]


def test_a_resolution_is_for_its_conflict_alone(rebased: Rebased) -> None:
    recorded(rebased)
    release(rebased, demo__core=NEW_CORE.replace("return 55\n", "return 56\n"))
    done = rebased.run("2.0.0", "--dry-run")
    assert rebased.verdicts(done)[2] == "conflict"


def test_a_resolution_is_for_its_releases_alone(rebased: Rebased) -> None:
    recorded(rebased)
    rebased.upstream.release("3.0.0", {**FILES, "demo/core.py": NEW_CORE})
    assert rebased.verdicts(rebased.run("3.0.0", "--dry-run"))[2] == "conflict"
    (path,) = resolutions(rebased)
    other = path.parents[2] / "1.0.0..3.0.0" / path.parent.name
    other.mkdir(parents=True)
    shutil.copy(path, other)
    done = rebased.run("3.0.0", "--dry-run")
    assert done.code == 4
    assert "was recorded for another conflict" in done.error["message"]


def test_a_damaged_resolution_is_not_used(rebased: Rebased) -> None:
    recorded(rebased)
    (path,) = resolutions(rebased)
    path.write_bytes(path.read_bytes()[20:])
    assert rebased.run("2.0.0", "--dry-run").code == 4


def test_the_series_may_be_edited_while_a_rebase_is_open(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    series = rebased.tree.parent / "series.toml"
    series.write_text(series.read_text().replace('test = "python -m pytest tests"', 'test = "true"'))
    assert rebased.run("--continue").code == 0
    assert {entry.test for entry in rebased.project.stack.series.patches} == {"true"}


def test_patches_cannot_be_taken_off_that_way(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    series = rebased.tree.parent / "series.toml"
    text = series.read_text()
    series.write_text(text[: text.rindex("[[patches]]")])
    done = rebased.run("--continue")
    assert done.code == 9
    assert "lists other patches" in done.error["message"]


def test_a_stack_that_changed_meanwhile_is_not_overwritten(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    series = rebased.project.series
    series.write_text(series.read_text().replace("# The order", "# The best order"))
    done = rebased.run("--continue")
    assert (done.code, done.error["details"]) == (9, ["patch-stack/demo/series.toml"])
    assert rebased.run("--abort").code == 0
    assert series.read_text().startswith("# The best order")


def test_uncommitted_changes_of_the_project_are_refused(rebased: Rebased) -> None:
    project = rebased.project
    (project.root / ".gitignore").write_text("/cache/\n/upstream/*/\n*.json\n/.vllm-stack/\n")
    project.git("init", "--quiet", cwd=project.root)
    project.git("add", "--all", "--force", "patch-stack", "upstream/demo.toml", cwd=project.root)
    project.git("commit", "--quiet", "--message", "all", cwd=project.root)
    series = project.series
    series.write_text(series.read_text() + "\n# more\n")
    (series.parent / "stray.txt").write_text("x\n")
    done = rebased.run("2.0.0")
    assert done.code == 9
    assert done.error["details"] == [" M patch-stack/demo/series.toml", "?? patch-stack/demo/stray.txt"]
    project.git("checkout", "--quiet", "--", "patch-stack", cwd=project.root)
    (series.parent / "stray.txt").unlink()
    assert rebased.run("2.0.0").report["status"] == "stopped"


def test_uncommitted_work_in_the_checkout_is_refused(rebased: Rebased) -> None:
    rebased.project.edit("demo/other.py", "VALUE = 2", "VALUE = 3")
    done = rebased.run("2.0.0")
    assert (done.code, done.error["details"]) == (9, [" M demo/other.py"])
    rebased.project.commit(message("[Core] Three"))
    done = rebased.run("2.0.0")
    assert done.code == 9
    assert "[Core] Three" in done.error["details"][0]
    assert not rebased.tree.parent.exists()


def test_without_a_checkout(rebased: Rebased) -> None:
    shutil.rmtree(rebased.project.checkout)
    rebased.run("2.0.0")
    resolve(rebased)
    assert rebased.run("--continue").code == 0
    assert not rebased.project.checkout.exists()
    rebased.project.ok("refresh", "--check")


def test_a_malformed_patch_is_reported_and_the_rest_tried(rebased: Rebased) -> None:
    release(rebased, demo__core=CORE)
    file = rebased.project.patch_file(FIRST)
    file.write_bytes(file.read_bytes().replace(b"@@ -", b"@@ -9", 1).replace(b",7 +", b",9 +", 1))
    done = rebased.run("2.0.0", "--dry-run")
    assert rebased.verdicts(done) == ["malformed", "clean", "clean", "clean", "clean"]


def test_a_tree_that_was_removed_comes_back(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    shutil.rmtree(rebased.tree)
    done = rebased.run("--continue")
    assert (done.code, done.report["waits_at"]) == (5, MIDDLE)
    assert "<<<<<<< demo 2.0.0" in (rebased.tree / "demo/core.py").read_text()


def test_words_that_do_not_go_together(rebased: Rebased) -> None:
    assert rebased.run().code == 2
    assert rebased.run("2.0.0", "--continue").code == 2
    assert rebased.run("--continue", "--abort").code == 2
    assert rebased.run("2.0.0", "--skip", "0999-nothing.patch", "--reason", "x").code == 2
    rebased.upstream.release("1.0.0", FILES)
    assert rebased.run("1.0.0").code == 2


def test_back_and_forth(rebased: Rebased) -> None:
    """To the next release and back again gives the patches that there were."""
    project = rebased.project
    before = project.patches()
    old = rebased.upstream.release("1.0.0", FILES)
    del old
    release(rebased, demo__core="# Head.\n\n" + CORE)
    assert rebased.run("2.0.0").code == 0
    assert project.patches() != before
    assert rebased.run("1.0.0").code == 0
    assert {name: data for name, data in project.patches().items() if name.endswith(".patch")} == {
        name: data for name, data in before.items() if name.endswith(".patch")
    }


def test_work_in_the_checkout_while_a_rebase_is_open_is_not_moved_away(rebased: Rebased) -> None:
    project = rebased.project
    project.ok("apply")
    rebased.run("2.0.0")
    resolve(rebased)
    before = rebased.project.patches()
    project.write("demo/other.py", "VALUE = 'mine'\n")
    done = rebased.run("--continue")
    assert (done.code, done.error["details"]) == (9, [" M demo/other.py"])
    commit = project.commit(message("[Demo] Work meanwhile"))
    done = rebased.run("--continue")
    assert done.code == 9
    assert done.error["details"][0].endswith("[Demo] Work meanwhile")
    assert project.patches() == before
    assert project.git("rev-parse", "HEAD").strip() == commit
    project.git("reset", "--quiet", "--hard", "HEAD^")
    assert rebased.run("--continue").report["status"] == "accepted"


@pytest.mark.parametrize("last", ["--abort", "--continue"])
def test_commits_made_while_accepting_was_interrupted_are_not_moved_away(
    rebased: Rebased, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    project = rebased.project
    project.ok("apply")
    rebased.run("2.0.0")
    resolve(rebased)
    with monkeypatch.context() as patch:
        patch.setattr(Checkout, "record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert rebased.run("--continue").code == 130
    project.write("demo/other.py", "VALUE = 'mine'\n")
    commit = project.commit(message("[Demo] Work meanwhile"))
    for word in ("--continue", "--abort"):
        done = rebased.run(word)
        assert done.code == 9, word
        assert done.error["details"][0].endswith("[Demo] Work meanwhile")
        assert project.git("rev-parse", "HEAD").strip() == commit
    project.git("reset", "--quiet", "--hard", "HEAD^")
    assert rebased.run(last).code == 0, "an --abort that was refused leaves both ways open"
    assert project.stack.pin.release == {"--abort": "1.0.0", "--continue": "2.0.0"}[last]


@pytest.mark.parametrize("word", ["--continue", "--abort"])
def test_a_dry_run_of_an_open_rebase_is_refused(rebased: Rebased, word: str) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    before = rebased.everything()
    assert rebased.run(word, "--dry-run").code == 2
    assert rebased.everything() == before
    assert rebased.tree.is_dir()


def test_a_line_left_between_two_versions_is_a_marker(rebased: Rebased) -> None:
    rebased.run("2.0.0")
    rebased.write("demo/core.py", RESOLVED.replace("    return 500 + 55\n", "    return 500 + 55\n=======\n"))
    done = rebased.run("--continue")
    assert done.code == 5
    assert [line.partition(": ")[2] for line in done.error["details"]] == ["======="]
    resolve(rebased)
    assert rebased.run("--continue").code == 0


def test_a_title_in_a_conflicting_file_is_not_a_marker(rebased: Rebased) -> None:
    title = "Changes\n=======\n"
    release(rebased, demo__core=f'"""{title}"""\n{NEW_CORE}')
    rebased.run("2.0.0")
    rebased.write("demo/core.py", f'"""{title}"""\n{RESOLVED}')
    assert rebased.run("--continue").code == 0


def test_what_only_seems_to_be_absorbed_can_be_kept(rebased: Rebased) -> None:
    """The patch's line stands in a larger change of upstream's, which does something else with it."""
    larger = "def function_5(x):\n    if x:\n        return 50\n    return 500\n    return 501\n"
    release(rebased, demo__core=CORE.replace("def function_5():\n    return 5\n", larger))
    done = rebased.run("2.0.0")
    assert rebased.verdicts(done)[2] == "absorbed"
    assert "--accept-absorbed" in done.error["hint"]
    assert str(rebased.tree) in done.error["hint"]
    text = CORE.replace("def function_5():\n    return 5\n", larger.replace("return 50\n", "return 500\n"))
    rebased.write("demo/core.py", text.replace("return 1\n", "return 100\n"))
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    assert rebased.verdicts(done)[2] == "three-way"
    assert MIDDLE in rebased.project.patches()


def test_what_seems_to_be_absorbed_can_be_accepted(rebased: Rebased) -> None:
    larger = "def function_5(x):\n    if x:\n        return 50\n    return 500\n    return 501\n"
    release(rebased, demo__core=CORE.replace("def function_5():\n    return 5\n", larger))
    rebased.run("2.0.0")
    done = rebased.run("--accept-absorbed", MIDDLE)
    assert done.code == 0, done.err
    assert MIDDLE not in rebased.project.patches()


def test_a_mode_is_not_lost_in_a_conflict_of_lines(rebased: Rebased) -> None:
    project = rebased.project
    project.ok("apply")
    (project.checkout / "demo/core.py").chmod(0o755)
    project.git("commit", "--all", "--quiet", "--fixup=:/Return five hundred")
    project.git("rebase", "--quiet", "--interactive", "--autosquash", "refs/stack/base")
    project.ok("refresh")
    rebased.run("2.0.0")
    resolve(rebased)
    done = rebased.run("--continue")
    assert done.code == 0, done.err
    assert b"old mode 100644\nnew mode 100755\n" in project.patches()[MIDDLE]


@pytest.mark.parametrize("word", ["--accept-absorbed", "--accept-contracts"])
def test_a_decision_that_does_not_fit_leaves_what_was_edited(rebased: Rebased, word: str) -> None:
    rebased.run("2.0.0")
    resolve(rebased)
    done = rebased.run(word, MIDDLE, "--reason", "a slip")
    assert done.code == 2
    assert "conflict" in done.error["message"]
    assert (rebased.tree / "demo/core.py").read_text() == RESOLVED
    assert rebased.run("--continue").code == 0


def test_files_that_only_a_resolution_brings_or_leaves_out_are_named(rebased: Rebased) -> None:
    """A slip in the tree, which has all of upstream's files, must not get into a patch unseen."""
    release(rebased, demo__core="# Head.\n\n" + CORE, demo__new="NEW = 'theirs'\n")
    done = rebased.run("2.0.0")
    assert done.report["waits_at"] == MODULE
    rebased.write("demo/new.py", "NEW = 'theirs'\n")
    rebased.write("demo/core.py", "# Slip.\n" + (rebased.tree / "demo/core.py").read_text())
    done = rebased.run("--continue")
    assert done.report["patches"][1]["messages"] == [
        "demo/core.py: the patch changes it because of the resolution",
        "demo/new.py: the resolution leaves no change of it",
    ]
    assert "demo/core.py: the patch changes it because of the resolution" in done.out

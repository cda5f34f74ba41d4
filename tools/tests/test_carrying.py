"""Patches against upstreams that changed in every way that upstreams do: real git, nothing misplaced."""

from __future__ import annotations

import hashlib
import re
import resource
from typing import TYPE_CHECKING

import pytest
from stackproject import message
from tworeleases import TwoReleases

from vllm_stack.applying import Outcome, take_apart, try_stack
from vllm_stack.carrying import Attempt, carry
from vllm_stack.export import export_commit
from vllm_stack.git import GitError
from vllm_stack.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tworeleases import Content, Files

CORE = "".join(f"def function_{n}(value):\n    value += {n}\n    return value * {n}\n\n\n" for n in range(12))
TABLE = 'NAMES = [\n    "alpha",\n    "beta",\n    "delta",\n    "epsilon",\n    "zeta",\n]\n'
KINDS = (
    "import enum\n\n\nclass Kind(enum.Enum):\n    ONE = 1\n    TWO = 2\n    THREE = 3\n\n\n"
    "def pick(kind):\n    return kind\n"
)
TWICE = (
    "class First:\n    def run(self):\n        start()\n        work()\n        check()\n        finish()\n"
    "        report()\n        return True\n\n\n"
    "class Second:\n    def run(self):\n        start()\n        work()\n        check()\n        finish()\n"
    "        report()\n        return True\n\n\n"
)
FILES: Files = {"demo/core.py": CORE, "demo/table.py": TABLE, "demo/kinds.py": KINDS, "demo/twice.py": TWICE}


def attempt(
    folder: Path, patch: Mapping[str, Content | None], upstream: Mapping[str, Content | None]
) -> tuple[TwoReleases, Attempt]:
    """Make a patch of the changes ``patch``, and carry it to a release with the changes ``upstream``."""
    changed = {**FILES, **upstream}
    new = {path: content for path, content in changed.items() if content is not None}
    releases = TwoReleases(folder, dict(FILES), new)
    made = releases.add_patch(patch)
    git = releases.git
    return releases, carry(git, made, releases.old_base, releases.head, releases.new_base)


def text(releases: TwoReleases, done: Attempt, path: str) -> str:
    """Return a file of what carrying gave."""
    assert done.tree is not None
    return releases.git.blob(done.tree, path).decode()


def edited(content: Content, *pairs: tuple[str, str]) -> str:
    """Replace texts that are there exactly once."""
    assert isinstance(content, str)
    for old, new in pairs:
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    return content


FIX = ("return value * 5\n", "return value * 500\n")


def test_nothing_changed_upstream(tmp_path: Path) -> None:
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {})
    assert done.outcome is Outcome.STRICT
    assert text(releases, done, "demo/core.py") == edited(CORE, FIX)


def test_lines_moved(tmp_path: Path) -> None:
    new = "# A comment.\n\n" + CORE
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome is Outcome.OFFSET
    assert text(releases, done, "demo/core.py") == edited(new, FIX)


def test_context_changed(tmp_path: Path) -> None:
    rename = ("def function_5(", "def function_five(")
    changed = edited(CORE, ("return value * 4\n", "return value * 44\n"))
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, rename)}, {"demo/core.py": changed})
    assert done.outcome is Outcome.THREE_WAY
    assert text(releases, done, "demo/core.py") == edited(changed, rename)


def test_absorbed_alone(tmp_path: Path) -> None:
    fixed = edited(CORE, FIX)
    _, done = attempt(tmp_path, {"demo/core.py": fixed}, {"demo/core.py": fixed})
    assert (done.outcome, done.tree) == (Outcome.ABSORBED, None)


def test_absorbed_with_other_changes_elsewhere(tmp_path: Path) -> None:
    new = edited(CORE, FIX, ("value += 0\n", "value += 1000\n"))
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome is Outcome.ABSORBED


def test_absorbed_within_a_squash_that_changed_the_neighbours(tmp_path: Path) -> None:
    new = edited(
        CORE, FIX, ("    value += 5\n", "    value -= 5\n"), ("def function_5(value)", "def function_5(x)")
    )
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome is Outcome.ABSORBED
    assert done.messages == ("demo/core.py: upstream seems to have 1 of the hunks, within a larger change",)


def test_partly_absorbed(tmp_path: Path) -> None:
    second = ("return value * 9\n", "return value * 900\n")
    new = edited(CORE, FIX, ("    value += 5\n", "    value -= 5\n"))
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX, second)}, {"demo/core.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages[-1] == "demo/core.py: upstream seems to have 1 of the hunks, within a larger change"
    assert done.marked is not None
    assert second[1] in releases.git.blob(done.marked, "demo/core.py").decode()


def test_equal_lines_within_a_larger_change_that_do_something_else(tmp_path: Path) -> None:
    """No hunk leaves a patch that stays without a person having seen it."""
    loop = "def first(items):\n    for item in items:\n"
    old = f"{loop}        if item is None:\n            log(item)\n        use(item)\n"
    mine = ("            log(item)\n", "            log(item)\n            return False\n")
    theirs = (
        old.replace("        use(item)\n", "")
        .replace("item is None", "item is Empty")
        .replace(
            "log(item)\n",
            "warn(item)\n        elif item.broken:\n            return False\n        use(item)\n",
        )
    )
    second = ("return value * 9\n", "return value * 900\n")
    releases = TwoReleases(tmp_path, {"demo/core.py": old + CORE}, {"demo/core.py": theirs + CORE})
    made = releases.add_patch({"demo/core.py": edited(old + CORE, mine, second)})
    done = carry(releases.git, made, releases.old_base, releases.head, releases.new_base)
    assert done.outcome is Outcome.CONFLICT


def test_a_neighbour_changed_and_the_change_is_not_there(tmp_path: Path) -> None:
    new = edited(CORE, ("    value += 5\n", "    value -= 5\n"))
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == (
        "demo/core.py: upstream changed the lines that the patch changes, or their neighbours",
    )
    assert [at.path for at in done.conflicts] == ["demo/core.py"]


def test_deletion_only(tmp_path: Path) -> None:
    gone = ("    value += 5\n", "")
    new = edited(CORE, ("value += 0\n", "value += 1000\nVALUE = 1\n"))
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, gone)}, {"demo/core.py": new})
    assert done.outcome is Outcome.OFFSET
    assert text(releases, done, "demo/core.py") == edited(new, gone)


def test_deletion_only_absorbed(tmp_path: Path) -> None:
    gone = ("    value += 5\n", "")
    new = edited(CORE, gone, ("def function_5(value)", "def function_5(x)"))
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, gone)}, {"demo/core.py": new})
    assert done.outcome is Outcome.ABSORBED


def test_a_line_to_delete_that_upstream_changed(tmp_path: Path) -> None:
    new = edited(CORE, ("    value += 5\n", "    value += 55\n"))
    _, done = attempt(
        tmp_path, {"demo/core.py": edited(CORE, ("    value += 5\n", ""))}, {"demo/core.py": new}
    )
    assert done.outcome is Outcome.CONFLICT


@pytest.mark.parametrize(
    "white", ["    value  += 5\n", "\tvalue += 5\n", "    value += 5 \n", "    value += 5\n\n"]
)
def test_whitespace_only(tmp_path: Path, white: str) -> None:
    change = ("    value += 5\n", white)
    new = "# moved\n" + CORE
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, change)}, {"demo/core.py": new})
    assert done.outcome is Outcome.OFFSET
    assert text(releases, done, "demo/core.py") == edited(new, change)


def test_whitespace_only_absorbed(tmp_path: Path) -> None:
    white = edited(CORE, ("    value += 5\n", "\tvalue += 5\n"))
    _, done = attempt(tmp_path, {"demo/core.py": white}, {"demo/core.py": white})
    assert done.outcome is Outcome.ABSORBED


def test_file_renamed(tmp_path: Path) -> None:
    new = edited(CORE, ("value += 0\n", "value += 1000\n"))
    releases, done = attempt(
        tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": None, "demo/moved/kernel.py": new}
    )
    assert done.outcome is Outcome.THREE_WAY
    assert text(releases, done, "demo/moved/kernel.py") == edited(new, FIX)
    assert "demo/moved/kernel.py: upstream's new name of a file that the patch changes" in done.messages


def test_file_renamed_and_rewritten_there(tmp_path: Path) -> None:
    new = edited(CORE, ("    return value * 5\n", "    return value * 55\n"))
    _, done = attempt(
        tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": None, "demo/kernel.py": new}
    )
    assert done.outcome is Outcome.CONFLICT
    assert [at.path for at in done.conflicts] == ["demo/kernel.py"]


def test_file_deleted(tmp_path: Path) -> None:
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": None})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("demo/core.py: the new release does not have it any more",)
    (at,) = done.conflicts
    assert (at.ours, at.is_of_lines) == (None, False)


def test_a_file_that_the_patch_deletes_is_gone(tmp_path: Path) -> None:
    _, done = attempt(tmp_path, {"demo/core.py": None}, {"demo/core.py": None})
    assert done.outcome is Outcome.ABSORBED


def test_a_file_that_the_patch_deletes_was_changed(tmp_path: Path) -> None:
    _, done = attempt(tmp_path, {"demo/core.py": None}, {"demo/core.py": "# new\n" + CORE})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("demo/core.py: the patch deletes it, upstream changed it",)


def moved_function(at: int) -> str:
    """Return the file with function_5 in another place."""
    parts = CORE.split("\n\n\n")[:-1]
    function = parts.pop(5)
    parts.insert(at, function)
    return "\n\n\n".join(parts) + "\n\n\n"


@pytest.mark.parametrize("at", [0, 2, 9, 11])
def test_function_moved(tmp_path: Path, at: int) -> None:
    """Its neighbours are others now, so that a person decides; the change goes nowhere by itself."""
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": moved_function(at)})
    assert done.outcome is Outcome.CONFLICT


def test_function_moved_with_its_surroundings(tmp_path: Path) -> None:
    body = CORE.split("\n\n\n")
    new = "\n\n\n".join([*body[3:8], *body[:3], *body[8:]])
    releases, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome in (Outcome.STRICT, Outcome.OFFSET)
    assert text(releases, done, "demo/core.py") == edited(new, FIX)


def test_enum_rewritten(tmp_path: Path) -> None:
    ours = edited(KINDS, ("    THREE = 3\n", "    THREE = 3\n    FOUR = 4\n"))
    new = edited(
        KINDS, ("    ONE = 1\n    TWO = 2\n    THREE = 3\n", '    ONE = "a.One"\n    THREE = "b.Three"\n')
    )
    _, done = attempt(tmp_path, {"demo/kinds.py": ours}, {"demo/kinds.py": new})
    assert done.outcome is Outcome.CONFLICT


def test_enum_has_the_member_under_another_value(tmp_path: Path) -> None:
    ours = edited(KINDS, ("    THREE = 3\n", "    THREE = 3\n    FOUR = 4\n"))
    new = edited(KINDS, ("    THREE = 3\n", "    THREE = 3\n    FOUR = 44\n"))
    _, done = attempt(tmp_path, {"demo/kinds.py": ours}, {"demo/kinds.py": new})
    assert done.outcome is Outcome.CONFLICT


def test_list_reordered(tmp_path: Path) -> None:
    ours = edited(TABLE, ('    "delta",\n', '    "gamma",\n    "delta",\n'))
    new = 'NAMES = [\n    "zeta",\n    "delta",\n    "epsilon",\n    "alpha",\n    "beta",\n]\n'
    releases, done = attempt(tmp_path, {"demo/table.py": ours}, {"demo/table.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert text(releases, done, "demo/table.py") == new


INTO_SECOND = "class Second:\n    def run(self):\n        start()\n        work()\n"


def patched_twice(content: str, name: str) -> str:
    """Add a line to the method of the class ``name``."""
    before, head, after = content.partition(f"class {name}:\n")
    return before + head + after.replace("        check()\n", "        check()\n        again()\n", 1)


def test_the_same_context_twice_stays_where_it_was_meant(tmp_path: Path) -> None:
    for name in ("First", "Second"):
        folder = tmp_path / name
        folder.mkdir()
        new = "import os\n\n\n" + TWICE
        releases, done = attempt(
            folder, {"demo/twice.py": patched_twice(TWICE, name)}, {"demo/twice.py": new}
        )
        assert done.outcome is Outcome.OFFSET
        assert text(releases, done, "demo/twice.py") == patched_twice(new, name)


def test_a_third_one_in_front_does_not_get_the_change(tmp_path: Path) -> None:
    """Where the patch's line numbers are there is now other code with the very same lines."""
    third = TWICE[: TWICE.index("class Second")].replace("First", "Zeroth")
    new = third + TWICE
    _, done = attempt(tmp_path, {"demo/twice.py": patched_twice(TWICE, "First")}, {"demo/twice.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("applying it and merging it put the change in different places",)


def test_the_one_that_was_meant_is_gone(tmp_path: Path) -> None:
    """Only its twin is left: applying with equal context would change that one without a word."""
    new = TWICE[TWICE.index("class Second") :]
    _, done = attempt(tmp_path, {"demo/twice.py": patched_twice(TWICE, "First")}, {"demo/twice.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert [at.path for at in done.conflicts] == ["demo/twice.py"]


def test_twins_swapped(tmp_path: Path) -> None:
    half = TWICE.index("class Second")
    new = TWICE[half:] + TWICE[:half]
    releases, done = attempt(
        tmp_path, {"demo/twice.py": patched_twice(TWICE, "First")}, {"demo/twice.py": new}
    )
    if done.outcome is not Outcome.CONFLICT:
        assert text(releases, done, "demo/twice.py") == patched_twice(new, "First")


def test_twins_without_a_scope(tmp_path: Path) -> None:
    """Two equal blocks in a file without functions, a third in front: nothing tells them apart."""
    block = "step: build\nstep: test\nstep: check\nstep: pack\nstep: ship\nstep: end\n\n"
    changed = block.replace("step: ship\n", "step: ship\nstep: sign\n")
    releases = TwoReleases(tmp_path, {"ci.txt": block * 2}, {"ci.txt": block * 3})
    made = releases.add_patch({"ci.txt": changed + block})
    done = carry(releases.git, made, releases.old_base, releases.head, releases.new_base)
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("ci.txt:3: hunk 1 fits here, but its place cannot be told for certain",)


def test_our_new_file_appeared_with_other_content(tmp_path: Path) -> None:
    _, done = attempt(tmp_path, {"demo/new.py": "OURS = 1\n"}, {"demo/new.py": "THEIRS = 1\n"})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == (
        "demo/new.py: the patch adds it, and the new release has one with other content",
    )


def test_our_new_file_appeared_with_the_same_content(tmp_path: Path) -> None:
    _, done = attempt(tmp_path, {"demo/new.py": "OURS = 1\n"}, {"demo/new.py": "OURS = 1\n"})
    assert done.outcome is Outcome.ABSORBED


def test_the_folder_of_our_new_file_was_renamed(tmp_path: Path) -> None:
    upstream: dict[str, Content | None] = dict.fromkeys(FILES)
    upstream |= {path.replace("demo/", "renamed/"): content for path, content in FILES.items()}
    _, done = attempt(tmp_path, {"demo/new.py": "OURS = 1\n"}, upstream)
    assert done.outcome is Outcome.CONFLICT
    assert any("file location" in message for message in done.messages), done.messages


def test_upstream_took_crlf(tmp_path: Path) -> None:
    new = CORE.replace("\n", "\r\n")
    _, done = attempt(tmp_path, {"demo/core.py": edited(CORE, FIX)}, {"demo/core.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("demo/core.py: upstream changed its line endings to CRLF",)


def test_a_binary_file_that_both_changed(tmp_path: Path) -> None:
    old, new = {"demo/data.bin": b"\0one\n"}, {"demo/data.bin": b"\0two\n"}
    releases = TwoReleases(tmp_path, {**old, "demo/core.py": CORE}, {**new, "demo/core.py": CORE})
    made = releases.add_patch({"demo/data.bin": b"\0three\n"})
    done = carry(releases.git, made, releases.old_base, releases.head, releases.new_base)
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == (
        "demo/data.bin: it is a binary file, and both the patch and upstream changed it",
    )


def test_upstream_has_had_crlf_all_along(tmp_path: Path) -> None:
    old = CORE.replace("\n", "\r\n")
    fix = ("return value * 5\r\n", "return value * 500\r\n")
    new = "# moved\r\n" + old
    releases = TwoReleases(tmp_path, {"demo/core.py": old}, {"demo/core.py": new})
    made = releases.add_patch({"demo/core.py": edited(old, fix)})
    done = carry(releases.git, made, releases.old_base, releases.head, releases.new_base)
    assert done.outcome is Outcome.OFFSET
    assert releases.git.blob(str(done.tree), "demo/core.py").decode() == edited(new, fix)


def test_upstream_made_the_change_elsewhere_in_the_file(tmp_path: Path) -> None:
    """Its own copy of our new function further down: applying ours too would define it twice."""
    added = "def helper(value):\n    return value * 77\n\n\n"
    ours = edited(CORE, ("def function_5(", f"{added}def function_5("))
    new = CORE + added
    _, done = attempt(tmp_path, {"demo/core.py": ours}, {"demo/core.py": new})
    assert done.outcome is Outcome.CONFLICT
    assert done.messages == ("demo/core.py: the patch adds helper, and the new release has one",)


def test_malformed(tmp_path: Path) -> None:
    releases = TwoReleases(tmp_path, dict(FILES), dict(FILES))
    made = releases.add_patch({"demo/core.py": edited(CORE, FIX)})
    broken = type(made)(made.name, re.sub(rb"@@ -(\d+),7", rb"@@ -\1,9", made.data))
    assert broken.data != made.data
    done = carry(releases.git, broken, releases.old_base, releases.head, releases.new_base)
    assert (done.outcome, done.tree) == (Outcome.MALFORMED, None)
    assert "header says" in done.messages[0]


def test_file_modes(tmp_path: Path) -> None:
    """A link in place of the file is another kind of thing, not changed lines."""
    releases = TwoReleases(tmp_path, dict(FILES), dict(FILES))
    made = releases.add_patch({"demo/core.py": edited(CORE, FIX)})
    git = releases.git
    index = {"GIT_INDEX_FILE": str(tmp_path / "index")}
    git.run("read-tree", releases.new_base, env=index)
    link = git.run("hash-object", "-w", "--stdin", stdin=b"other.py").text
    git.run("update-index", "--cacheinfo", f"120000,{link},demo/core.py", env=index)
    tree = git.run("write-tree", env=index).text
    new = git.run("commit-tree", tree, "-m", "link").text
    done = carry(git, made, releases.old_base, releases.head, new)
    assert done.outcome is Outcome.CONFLICT


def moded(releases: TwoReleases, base: str, mode: str, path: str) -> str:
    """Commit a file of ``base`` with another mode and return the commit."""
    git = releases.git
    index = {"GIT_INDEX_FILE": str(releases.folder / "index")}
    git.run("read-tree", base, env=index)
    git.run("update-index", "--cacheinfo", f"{mode},{git.resolve(f'{base}:{path}')},{path}", env=index)
    tree = git.run("write-tree", env=index).text
    return git.run("commit-tree", tree, "-p", base, "-F", "-", stdin=message("[Demo] Mode").encode()).text


def test_a_mode_that_the_new_release_has(tmp_path: Path) -> None:
    """A mode applies where it is already, and changes nothing there."""
    releases = TwoReleases(tmp_path, dict(FILES), {**FILES, "demo/table.py": TABLE.upper()})
    after = moded(releases, releases.old_base, "100755", "demo/core.py")
    made = Patch("0100-demo-topic-mode.patch", export_commit(releases.git, after))
    new = moded(releases, releases.new_base, "100755", "demo/core.py")
    done = carry(releases.git, made, releases.old_base, after, new)
    assert (done.outcome, done.tree) == (Outcome.ABSORBED, None)


def test_a_folder_stands_where_our_new_file_goes(tmp_path: Path) -> None:
    releases, done = attempt(tmp_path, {"demo/ours": "x\n"}, {"demo/ours/deep.py": "pass\n"})
    assert done.outcome is Outcome.CONFLICT
    assert [at.path for at in done.conflicts] == ["demo/ours~the patch"]
    listed = [
        releases.git.run("ls-tree", "-r", "--name-only", str(tree), "demo/").lines
        for tree in (releases.new_base, done.tree, done.marked)
    ]
    assert listed[1] == listed[0]
    assert listed[2] == sorted([*listed[0], "demo/ours~the patch"])


def forgotten(folder: Path) -> tuple[TwoReleases, Path]:
    """Return a stack of one patch that adds a file of 200 kB, and where git has to write its bytes."""
    releases = TwoReleases(folder, dict(FILES), dict(FILES))
    added = "".join(f"{hashlib.sha256(b'%d' % n).hexdigest()}\n" for n in range(3000))
    releases.add_patch({"demo/added.py": added})
    entry = releases.git.entry(releases.head, "demo/added.py")
    assert entry is not None
    written = folder / "releases.git" / "objects" / entry.id[:2] / entry.id[2:]
    written.unlink()
    return releases, written


def test_a_git_that_is_killed_says_nothing_about_a_patch(tmp_path: Path) -> None:
    releases, _ = forgotten(tmp_path)
    take_apart(releases.patches[0].data)  # which is kept, as it takes as much room
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(GitError, match=r"git apply .* failed with exit status -"):
            try_stack(releases.git, releases.old_base, releases.patches)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_git_that_cannot_write_says_nothing_about_a_patch(tmp_path: Path) -> None:
    releases, written = forgotten(tmp_path)
    written.parent.rmdir()
    written.parent.write_text("in the way")
    with pytest.raises(GitError, match=r"git apply .* failed with exit status ") as caught:
        try_stack(releases.git, releases.old_base, releases.patches)
    assert "unable to create" in caught.value.details[-1]

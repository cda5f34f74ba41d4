"""The patch parser and the stack id, with git as the judge."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stackproject import GIT_CONFIGURATION, message

from vllm_stack.applying import Outcome, apply_patch
from vllm_stack.base import init_repository
from vllm_stack.export import export_commit
from vllm_stack.patch import Patch
from vllm_stack.stack import compute_stack_id

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_stack.git import Git

LINES = st.lists(
    st.sampled_from(["", "a", "b", "    c", "-- x", "--- y", "+++ z", "@@ q", "diff --git w", "\\ no"]),
    max_size=14,
)
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + ("\n" if lines and end else ""), LINES, st.booleans())
PATHS = st.sampled_from(
    ["a.py", "dir/b.py", "sp ace.py", "b/a/b/x.py", "ümlaut.py", 'quo"te.py', "tab\tname"]
)
TREES = st.dictionaries(PATHS, TEXTS, max_size=4)


def commit(git: Git, files: dict[str, str], text: str, parent: str | None) -> str:
    """Make a commit of exactly these files."""
    entries = []
    for path, content in files.items():
        blob = git.run("hash-object", "-w", "--stdin", stdin=content.encode()).text
        entries.append(f"100644 {blob}\t{path}\0")
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        git.run("update-index", "-z", "--index-info", stdin="".join(entries).encode(), env=index)
        tree = git.run("write-tree", env=index).text
    parents = ["-p", parent] if parent else []
    return git.run("commit-tree", tree, *parents, "-F", "-", stdin=text.encode()).text


@pytest.fixture(scope="module")
def git(tmp_path_factory: pytest.TempPathFactory) -> Git:
    return init_repository(tmp_path_factory.mktemp("repository") / "r.git", bare=True)


@settings(deadline=None, max_examples=60)
@given(before=TREES, after=TREES)
def test_what_git_exports_parses_applies_and_exports_again(
    git: Git, before: dict[str, str], after: dict[str, str]
) -> None:
    text = message("[Core] Über [brackets] and a line that is long enough to be folded by the mail format")
    base = commit(git, before, "base\n", None)
    head = commit(git, after, text, base)
    patch = Patch("0100-x.patch", export_commit(git, head))
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if not changed:
        assert patch.data == b""
        assert [problem.code for problem in patch.problems] == ["no-diff"]
        return
    assert set(patch.paths) == changed
    assert patch.subject == text.partition("\n")[0]
    assert f"{patch.subject}\n\n{patch.message}\n" == text
    assert dict(patch.trailers)["Topic"] == "demo-topic"
    assert patch.problems == ()
    applied = apply_patch(git, base, patch)
    assert applied.outcome is Outcome.STRICT
    assert applied.commit is not None
    assert git.tree(applied.commit) == git.tree(head)
    assert export_commit(git, applied.commit) == patch.data
    statuses = {file.path: file.status for file in patch.files}
    for path in changed:
        assert statuses[path] == ("A" if path not in before else "D" if path not in after else "M")


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_patch_that_lint_passes_is_one_that_git_reads(git: Git, data: st.DataObject) -> None:
    """Drop or double one line of a diff: whenever git calls it corrupt, the parser found a problem."""
    before = {"a.py": "".join(f"{n}\n" for n in range(20))}
    after = {"a.py": before["a.py"].replace("3\n", "three\n", 1).replace("15\n", "", 1)}
    base = commit(git, before, "base\n", None)
    lines = export_commit(git, commit(git, after, message("[Core] x"), base)).split(b"\n")
    first = next(n for n, line in enumerate(lines) if line.startswith(b"@@"))
    at = data.draw(st.integers(first, len(lines) - 2))
    lines[at : at + 1] = [lines[at]] * data.draw(st.sampled_from([0, 2]))
    patch = Patch("x.patch", b"\n".join(lines))
    corrupt = (
        b"corrupt patch" in git.run("apply", "--cached", "--check", "-", stdin=patch.data, check=False).stderr
    )
    if corrupt:
        assert patch.problems
    codes = {problem.code for problem in patch.problems}
    assert codes <= {"hunk-count", "hunk-header", "no-diff"}


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=4), st.binary(max_size=6)), max_size=4),
    st.lists(st.tuples(st.text(min_size=1, max_size=4), st.binary(max_size=6)), max_size=4),
)
def test_stack_ids_are_equal_only_for_equal_stacks(
    one: list[tuple[str, bytes]], other: list[tuple[str, bytes]]
) -> None:
    first = compute_stack_id("t", "1", [Patch(*item) for item in one])
    second = compute_stack_id("t", "1", [Patch(*item) for item in other])
    assert (first == second) == (one == other)
    assert compute_stack_id("t", "11", []) != compute_stack_id("t1", "1", [])


def test_the_stack_id_is_what_the_design_says() -> None:
    expected = hashlib.sha256(b"4:demo5:1.0.012:0100-x.patch3:abc").hexdigest()
    assert compute_stack_id("demo", "1.0.0", [Patch("0100-x.patch", b"abc")]) == expected


def test_the_hostile_configuration_does_break_git(tmp_path: Path) -> None:
    """Without this, running the suite under it would show nothing."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, env=_plain_environment())
    done = subprocess.run(
        ["git", "-C", tmp_path, "config", "--get", "diff.noprefix"],
        check=False,
        capture_output=True,
        env=_plain_environment(),
    )
    assert done.stdout == (b"true\n" if GIT_CONFIGURATION == "hostile" else b"")


def _plain_environment() -> dict[str, str]:
    return {key: os.environ[key] for key in ("HOME", "PATH")}

"""Indexes in which trees are changed without a working tree, and without touching any other index.

Reading a whole tree into an index takes longer than what is then done with it. While a repository is opened
one index is kept, and brought from the tree that it holds to the one that is wanted.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_stack.git import Git, GitResult
    from vllm_stack.objects import Entry

#: git's word for "nothing there" in a list of entries.
ABSENT = "0" * 40
#: Two trees that differ in this many files are not brought into one another.
_MOST_CHANGES = 200


class ScratchIndex:
    """An index that belongs to nobody else, in a folder of its own; :meth:`remove` takes it away."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-stack-")
        self._environment = {"GIT_INDEX_FILE": str(Path(self._folder.name) / "index")}
        #: The tree that it holds; None where that is not known.
        self._tree: str | None = None
        #: Whether somebody works in it.
        self.taken = False

    def remove(self) -> None:
        """Remove the index."""
        self._folder.cleanup()

    def hold(self, commit: str) -> None:
        """Make it hold a commit or a tree."""
        with self._git.reading() as objects:
            tree = objects.tree(commit)
            if self._tree == tree:
                return
            changes = objects.changes(self._tree, tree) if self._tree else iter(())
            first = dict(islice(changes, _MOST_CHANGES))
            if len(first) in (0, _MOST_CHANGES):
                self.run("read-tree", tree)
            else:
                self.put(first)
        self._tree = tree

    def run(
        self, *words: str, stdin: bytes = b"", check: bool = True, work_tree: Path | None = None
    ) -> GitResult:
        """Run a git command on the index, and on a working tree if one is given."""
        self._tree = None
        git = self._git if work_tree is None else replace(self._git, work_tree=work_tree)
        return git.run(*words, stdin=stdin, check=check, env=self._environment)

    def put(self, wanted: Mapping[str, Entry | None]) -> None:
        """Set the given paths, or remove them where there is None."""
        if not wanted:
            return
        # What has to go first: a file may be in the way of a folder.
        ordered = sorted(wanted.items(), key=lambda item: item[1] is not None)
        lines = (
            f"{entry.mode} {entry.id}\t{path}" if entry is not None else f"0 {ABSENT}\t{path}"
            for path, entry in ordered
        )
        self.run("update-index", "-z", "--index-info", stdin=_joined(lines))

    def apply(self, diff: bytes) -> GitResult:
        """Apply a diff without fuzz. The index is as it was when the diff does not apply."""
        held = self._tree
        done = self.run("apply", "--cached", "--verbose", "-", stdin=diff, check=False)
        if done.returncode:
            self._tree = held
        return done

    def write(self) -> str:
        """Return the index as a tree."""
        self._tree = self.run("write-tree").text
        return self._tree


def _joined(lines: Iterator[str]) -> bytes:
    return "\0".join(lines).encode("utf-8", "surrogateescape")


@contextmanager
def scratch_index(git: Git, commit: str) -> Iterator[ScratchIndex]:
    """Yield an index that holds ``commit`` (or a tree) and touches no other index."""
    kept = git.kept_index()
    index = ScratchIndex(git) if kept is None or kept.taken else kept
    index.taken = True
    try:
        index.hold(commit)
        yield index
    finally:
        index.taken = False
        if index is not kept:
            index.remove()

"""The files that a stack itself makes, which merging would look for under other names, patch after patch.

Where an earlier patch is not on the new release, its files are missing there, and git compares each of them
with all that upstream added whenever a later patch changes them. One look at all their versions tells it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from vllm_stack.applying import AppliedPatch
    from vllm_stack.git import Git
    from vllm_stack.objects import Objects


@dataclass(frozen=True)
class OwnFiles:
    """What the commits of a stack on its own release add to it."""

    git: Git
    old_base: str
    new_base: str
    """Commits of the two bare releases."""
    own: Iterable[AppliedPatch]
    """The stack on its own release."""

    def are_nowhere(self, blobs: Collection[str], old_before: str, new_before: str) -> bool:
        """Say whether merging can find none of the files ``blobs`` in ``new_before`` under another name."""
        if not self._made.issuperset(blobs):
            return False
        with self.git.reading() as objects:
            known = self._added.issuperset(self._appeared(objects, old_before, new_before))
        return known and not self._is_any_alike

    def _appeared(self, objects: Objects, old_before: str, new_before: str) -> Iterator[str | None]:
        """Yield what ``new_before`` may have beyond ``old_before`` and is not upstream's; None if unknown."""
        if any(entry is None for _, entry in objects.changes(self.old_base, old_before)):
            yield None  # a file that the stack took away is upstream's, and not among those it added
        for path, entry in objects.changes(self.new_base, new_before):
            if entry is not None and objects.find(old_before, path) is None:
                yield entry.id

    @cached_property
    def _made(self) -> frozenset[str]:
        """All versions of the files that only the stack has."""
        with self.git.reading() as objects:
            return frozenset(
                entry.id
                for patch in self.own
                for path, entry in objects.changes(self.old_base, patch.commit or self.old_base)
                if entry is not None
                and entry.kind == "blob"
                and objects.find(self.old_base, path) is None
                and objects.find(self.new_base, path) is None
            )

    @cached_property
    def _added(self) -> frozenset[str]:
        """The files that upstream added."""
        with self.git.reading() as objects:
            return frozenset(
                entry.id
                for path, entry in objects.changes(self.old_base, self.new_base)
                if entry is not None and entry.kind == "blob" and objects.find(self.old_base, path) is None
            )

    @cached_property
    def _is_any_alike(self) -> bool:
        """Whether git takes any file that upstream added for one of the stack's, renamed."""
        if not self._made or not self._added:
            return False
        listings = (
            "".join(f"100644 blob {blob}\t{name}-{blob}\n" for blob in blobs)
            for name, blobs in (("made", self._made), ("added", self._added))
        )
        trees = self.git.run("mktree", "--batch", stdin="\n".join(listings).encode()).lines
        # As alike as merging wants them, and without a limit to what is compared.
        words = ("-r", "--name-only", "--find-renames=50%", "-l32767", "--diff-filter=R")
        return bool(self.git.run("diff-tree", *words, *trees).stdout)

"""Finding a patch's change within a larger one of upstream's that also changed the lines around it.

git's merge sees two changes of the same lines and gives up. Here each hunk of the patch is looked for
inside the one change of upstream's that covers its lines; those found are taken out, and the rest is merged.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.merging import Merge, Side, Stages, with_sides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_stack.git import Git

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_WORD = re.compile(rb"\w\w")


@dataclass(frozen=True)
class Edit:
    """Lines ``first`` to ``last`` (from 0, exclusive) of a text become ``added``."""

    first: int
    last: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]


def without_absorbed(git: Git, merged: Merge) -> tuple[Merge, tuple[str, ...]]:
    """Merge conflicted files again without the hunks that upstream has; return what is left, and notes."""
    wanted: dict[str, Side | None] = {}
    notes = []
    for at in merged.conflicts:
        side, count = merge_rest(git, at)
        if side is not None:
            wanted[at.path] = side
            notes.append(f"{at.path}: upstream seems to have {count} of the hunks, within a larger change")
    if not wanted:
        return merged, ()
    left = tuple(at for at in merged.conflicts if at.path not in wanted)
    return replace(merged, tree=with_sides(git, merged.tree, wanted), conflicts=left), tuple(notes)


def merge_rest(git: Git, at: Stages) -> tuple[Side | None, int]:
    """Return the file merged without its absorbed hunks, and their number; None if it does not merge."""
    if not (at.base and at.ours and at.theirs and at.ours.mode == at.theirs.mode):
        return None, 0
    base = git.data(at.base.blob).split(b"\n")
    mine, upstream = (edits(git, at.base.blob, side.blob) for side in (at.theirs, at.ours))
    absorbed = [edit for edit in mine if any(_holds(larger, edit) for larger in upstream)]
    if not absorbed:
        return None, 0
    rest = [edit for edit in mine if edit not in absorbed]
    if not rest:
        return at.ours, len(absorbed)
    for edit in reversed(rest):
        base[edit.first : edit.last] = edit.added
    blob = _merge_files(git, at, b"\n".join(base))
    return (None if blob is None else Side(at.ours.mode, blob)), len(absorbed)


def _merge_files(git: Git, at: Stages, theirs: bytes) -> str | None:
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
        paths = [Path(folder) / name for name in ("ours", "base", "theirs")]
        for path, side in zip(paths, (at.ours, at.base), strict=False):
            path.write_bytes(git.data(side.blob) if side else b"")
        paths[2].write_bytes(theirs)
        done = git.run("merge-file", "-p", *paths, check=False)
    if done.returncode:
        return None
    return git.run("hash-object", "-w", "--no-filters", "--stdin", stdin=done.stdout).text


@lru_cache(maxsize=256)
def edits(git: Git, before: str, after: str) -> tuple[Edit, ...]:
    """Return the changes from one blob to another; none for files that are not text."""
    words = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--unified=0", before, after)
    found: list[Edit] = []
    for line in git.run(*words).stdout.split(b"\n"):
        match = _HUNK.match(line)
        if match:
            count = int(match[2] or 1)
            # Without lines of context git names the line before an insertion.
            first = int(match[1]) - (1 if count else 0)
            found.append(Edit(first, first + count, (), ()))
        elif found and line[:1] == b"-":
            found[-1] = replace(found[-1], removed=(*found[-1].removed, line[1:]))
        elif found and line[:1] == b"+":
            found[-1] = replace(found[-1], added=(*found[-1].added, line[1:]))
    return tuple(found)


def _holds(larger: Edit, edit: Edit) -> bool:
    """Say whether upstream's edit covers the lines of the patch's, and made of them what the patch does."""
    if not larger.first <= edit.first <= edit.last <= larger.last:
        return False
    if edit.added:
        telling = any(_WORD.search(line) for line in edit.added)
        return telling and _is_within(edit.added, larger.added)
    # Lines that the patch only removes: gone, and nothing came in their place.
    fewer = len(larger.removed) - len(larger.added) >= len(edit.removed)
    return fewer and not set(edit.removed) & set(larger.added)


def _is_within(lines: Sequence[bytes], text: Sequence[bytes]) -> bool:
    count = len(lines)
    return any(text[at : at + count] == lines for at in range(len(text) - count + 1))

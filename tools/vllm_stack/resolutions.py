"""Recorded resolutions: what a person made of a conflict, kept for the very same conflict alone.

They lie in ``patch-stack/<target>/resolutions/<old>..<new>/<patch>/<id>.patch``. The id is a hash over the
conflicting files in all three versions, so that a resolution is used for that conflict and for no other; it
is looked for under its pair of releases alone. The file holds the diff from the tree in which the
conflicted files are the new release's to the tree that the person made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_stack.applying import Outcome, apply_strictly
from vllm_stack.errors import IntegrityError
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm_stack.git import Git
    from vllm_stack.merging import Side, Stages

#: The folder within a stack's own.
FOLDER = "resolutions"
_HEAD = b"vllm-stack resolution 1\n"
_SEPARATOR = b"\n---\n"


@dataclass(frozen=True)
class Pair:
    """Two releases; what was recorded between them says nothing about any others."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old}..{self.new}"


@dataclass(frozen=True)
class Resolution:
    """What a person made of one conflict of one patch."""

    conflict: str
    """The conflict's id: 64 hex digits."""
    patch: str
    """Name of the patch file."""
    pair: Pair
    diff: bytes = field(repr=False)

    @property
    def path(self) -> str:
        """Where it lies below the folder of resolutions."""
        return f"{self.pair}/{self.patch.removesuffix('.patch')}/{self.conflict}.patch"

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        head = f"Patch: {self.patch}\nReleases: {self.pair}\nConflict: {self.conflict}\n"
        return _HEAD + head.encode() + _SEPARATOR + self.diff

    @classmethod
    def decode(cls, data: bytes, *, source: str) -> Resolution:
        """Read the bytes of a file; ``source`` names it. IntegrityError when it is not a resolution."""
        head, separator, diff = data.partition(_SEPARATOR)
        values = dict(
            line.split(": ", 1) for line in head.decode("utf-8", "replace").splitlines() if ": " in line
        )
        old, dots, new = values.get("Releases", "").partition("..")
        if not head.startswith(_HEAD.rstrip()) or not (separator and dots and values.get("Patch")):
            raise IntegrityError(
                f"{source} is not a recorded resolution", hint="remove it, or restore it from git"
            )
        return cls(values.get("Conflict", ""), values["Patch"], Pair(old, new), diff)

    def apply(self, git: Git, tree: str) -> str | None:
        """Return the tree that the resolution makes of ``tree``, or None when it does not fit it exactly."""
        if not self.diff:
            return tree
        with scratch_index(git, tree) as index:
            outcome, _ = apply_strictly(self.diff, index)
            return index.write() if outcome is Outcome.STRICT else None


def conflict_id(kind: str, patch: str, stages: Iterable[Stages], *more: str) -> str:
    """Return the id of a conflict of ``patch``: a hash over its files in all three versions."""
    digest = hashlib.sha256(f"{kind}\n{patch}\n".encode())
    for at in sorted(stages, key=lambda one: one.path):
        three = " ".join(_side(side) for side in (at.base, at.ours, at.theirs))
        digest.update(f"{three} {at.path}\n".encode("utf-8", "surrogateescape"))
    for part in more:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _side(side: Side | None) -> str:
    return f"{side.mode}:{side.blob}" if side else "-"


@dataclass(frozen=True)
class Resolutions:
    """The recorded resolutions of one pair of releases, in one or more folders; earlier ones go first."""

    pair: Pair
    folders: tuple[Path, ...]

    def find(self, patch: str, conflict: str) -> Resolution | None:
        """Return what was recorded for a conflict, or None.

        IntegrityError for a file that is not one, or that says it is another conflict's.
        """
        wanted = Resolution(conflict, patch, self.pair, b"")
        for folder in self.folders:
            path = folder / wanted.path
            if not path.is_file():
                continue
            found = Resolution.decode(path.read_bytes(), source=str(path))
            if (found.conflict, found.patch, found.pair) != (conflict, patch, self.pair):
                raise IntegrityError(
                    f"{path} was recorded for another conflict", hint="remove it, or restore it from git"
                )
            return found
        return None

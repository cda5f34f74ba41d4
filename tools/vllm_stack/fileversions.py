"""One file in four states: both bare releases, and both with the stack up to a patch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm_stack.absorbing import merge_rest
from vllm_stack.linemap import LineMap, Span, identity, map_lines
from vllm_stack.merging import merge, sides

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_stack.git import Git
    from vllm_stack.merging import Side
    from vllm_stack.objects import Entry
    from vllm_stack.patch import Hunk

HunkOutcome = Literal["conflict", "doubtful", "applies", "absorbed"]
"""``doubtful``: it merges, but not surely where it belongs."""


#: An image this many times as long as its lines is looked at again without regard to white space.
_MANY = 4


@dataclass(frozen=True)
class Version:
    """A file of a commit."""

    git: Git
    commit: str
    path: str

    @property
    def name(self) -> str:
        """How git calls the blob."""
        return f"{self.commit}:{self.path}"

    @cached_property
    def data(self) -> bytes:
        """The file's bytes. ObjectError when there is no such file."""
        return self.git.blob(self.commit, self.path)

    @cached_property
    def blob(self) -> str | None:
        """Id of the blob; None when the commit has no such file."""
        entry = self._entry
        return entry.id if entry is not None and entry.kind == "blob" else None

    @cached_property
    def kind(self) -> str | None:
        """``blob`` or ``tree`` (or ``commit``: a submodule); None when there is nothing of the name."""
        return self._entry.kind if self._entry is not None else None

    @cached_property
    def _entry(self) -> Entry | None:
        return self.git.entry(self.commit, self.path)

    @cached_property
    def raw_lines(self) -> tuple[bytes, ...]:
        """The lines, each with its line feed."""
        return _split(self.data)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines for people: without line feed, bytes that are no UTF-8 as escapes."""
        return tuple(shown(line.removesuffix(b"\n")) for line in self.raw_lines)


def _split(data: bytes) -> tuple[bytes, ...]:
    """Split at line feeds alone, as git does; a carriage return belongs to its line."""
    parts = data.split(b"\n")
    whole = [part + b"\n" for part in parts[:-1]]
    return tuple([*whole, parts[-1]] if parts[-1] else whole)


def shown(raw: bytes) -> str:
    """Return a line of a file as text."""
    return raw.decode("utf-8", "backslashreplace")


def lines_between(before: Version, after: Version, *, ignore_space: bool = False) -> LineMap:
    """Return which lines of one version became which of another."""
    lengths = (len(before.raw_lines), len(after.raw_lines))
    if before.blob == after.blob:
        return identity(lengths[0])
    return map_lines(before.git, before.blob or "", after.blob or "", lengths, ignore_space=ignore_space)


@dataclass(frozen=True)
class FileVersions:
    """The states of one file that exists on both sides, renamed or not.

    ``made_for`` and ``found`` are what the patch was made from and what it meets; ``old`` and ``new`` the
    bare releases, None where an earlier patch of the stack made the file.
    """

    made_for: Version
    found: Version
    old: Version | None
    new: Version | None

    @cached_property
    def forward(self) -> LineMap:
        """From what the patch was made from to what it meets."""
        return lines_between(self.made_for, self.found)

    @cached_property
    def _loosely(self) -> LineMap:
        """The same, white space disregarded."""
        return lines_between(self.made_for, self.found, ignore_space=True)

    def image(self, span: Span) -> Span:
        """Return the lines of what the patch meets that stand for ``span`` of what it was made from.

        A file with other line endings or indentation has no line left, so that all would stand for each.
        """
        image = self.forward.image(span)
        return image if len(image) <= _MANY * (len(span) + 1) else self._loosely.image(span)

    @cached_property
    def back(self) -> LineMap | None:
        """From what the patch was made from to the bare old release."""
        return lines_between(self.made_for, self.old) if self.old else None

    @cached_property
    def upstream(self) -> LineMap | None:
        """From the bare old release to the bare new one."""
        return lines_between(self.old, self.new) if self.old and self.new else None

    def has(self, hunk: Hunk) -> bool:
        """Say whether what a hunk makes stands at its place already."""
        image = self.image(hunk_span(hunk))
        return list(self.found.raw_lines[image.start : image.stop]) == _after(hunk)

    def try_hunks(self, hunks: Sequence[Hunk]) -> tuple[HunkOutcome, ...]:
        """Merge each hunk alone into what the patch meets, and say what came of it.

        Each gets a copy of the file, so that they do not meet and one merge does for all.
        """
        if not hunks:
            return ()
        git = self.found.git
        theirs = _write_blobs(git, [self._with(hunk) for hunk in hunks])
        count = len(theirs)
        sides_of_merge = ([self.made_for.blob] * count, [self.found.blob] * count, theirs)
        base, ours, wanted = _write_trees(git, sides_of_merge)
        root = git.run("commit-tree", base, "-m", "base").text
        merged = merge(git, root, ours, wanted)
        left = {at.path: merge_rest(git, at)[0] for at in merged.conflicts}
        made = {**sides(git, merged.tree, [str(at) for at in range(count)]), **left}
        return tuple(self._became(made[str(at)]) for at in range(count))

    def _became(self, made: Side | None) -> HunkOutcome:
        """Say what became of a hunk of which merging made this file; None when it could not be merged."""
        if made is None:
            return "conflict"
        return "absorbed" if made.blob == self.found.blob else "applies"

    def _with(self, hunk: Hunk) -> bytes:
        span = hunk_span(hunk)
        lines = self.made_for.raw_lines
        return b"".join([*lines[: span.start], *_after(hunk), *lines[span.stop :]])


def _write_blobs(git: Git, contents: Sequence[bytes]) -> list[str]:
    """Put contents into the repository; return the ids of their blobs."""
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
        paths = [Path(folder) / str(at) for at in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        request = "".join(f"{path.name}\n" for path in paths).encode()
        words = ("hash-object", "-w", "--no-filters", "--stdin-paths")
        return git.run(*words, stdin=request, cwd=Path(folder)).lines


def _write_trees(git: Git, trees: Iterable[Sequence[str | None]]) -> list[str]:
    """Make trees of blobs, whose names in them are their positions; return the ids of the trees."""
    lists = ("".join(f"100644 blob {blob}\t{at}\n" for at, blob in enumerate(blobs)) for blobs in trees)
    return git.run("mktree", "--batch", stdin="\n".join(lists).encode()).lines


def hunk_span(hunk: Hunk) -> Span:
    """Return the lines that a hunk was made from."""
    start = hunk.old_start - 1 if hunk.old_count else hunk.old_start
    return Span(start, start + hunk.old_count)


def _after(hunk: Hunk) -> list[bytes]:
    """Return the lines that a hunk leaves behind, with line feeds unless the file ends without one."""
    result: list[bytes] = []
    kept = False
    for line in hunk.lines:
        if line[:1] == b"\\":
            if kept:
                result[-1] = result[-1].removesuffix(b"\n")
            continue
        kept = line[:1] in (b" ", b"+")
        if kept:
            result.append(line[1:] + b"\n")
    return result

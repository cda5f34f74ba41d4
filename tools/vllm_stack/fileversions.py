"""One file in four states: both bare releases, and both with the stack up to a patch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from vllm_stack.absorbing import without_absorbed
from vllm_stack.linemap import LineMap, Span, identity, map_lines
from vllm_stack.merging import merge

if TYPE_CHECKING:
    from vllm_stack.git import Git
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
        """The file's bytes. GitError when there is no such file."""
        return self.git.run("cat-file", "blob", self.name).stdout

    @cached_property
    def blob(self) -> str | None:
        """Id of the blob; None when the commit has no such file."""
        done = self.git.run("rev-parse", "--verify", "--quiet", "--end-of-options", self.name, check=False)
        return None if done.returncode or self.kind != "blob" else done.text

    @cached_property
    def kind(self) -> str | None:
        """``blob`` or ``tree``; None when there is nothing of the name."""
        done = self.git.run("cat-file", "-t", self.name, check=False)
        return None if done.returncode else done.text

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
    return map_lines(before.git, before.name, after.name, lengths, ignore_space=ignore_space)


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

    def try_hunk(self, hunk: Hunk) -> HunkOutcome:
        """Merge one hunk alone into what the patch meets, and say what came of it."""
        git = self.found.git
        theirs = git.run("hash-object", "-w", "--stdin", stdin=self._with(hunk)).text
        blobs = (self.made_for.blob, self.found.blob, theirs)
        base, ours, wanted = (
            git.run("mktree", stdin=f"100644 blob {blob}\tfile\n".encode()).text for blob in blobs
        )
        merged, _ = without_absorbed(git, merge(git, base, ours, wanted))
        if not merged.is_clean:
            return "conflict"
        return "absorbed" if merged.tree == ours else "applies"

    def _with(self, hunk: Hunk) -> bytes:
        span = hunk_span(hunk)
        lines = self.made_for.raw_lines
        return b"".join([*lines[: span.start], *_after(hunk), *lines[span.stop :]])


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

"""Where a change lands: whether its place on another release is the one that it was written for.

Text alone can be in a file twice. A place is known by how often the text around it occurs, and by the
classes and functions around it; where these leave a doubt, a person decides.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_stack.patch import FileDiff, Hunk

_DEFINITION = re.compile(rb"^([ \t]*)(?:async[ \t]+def|def|class)[ \t]+(\w+)")
_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)\.$")

Scope = tuple[str, ...]
"""Names of the classes and functions around a line, outermost first."""


@dataclass(frozen=True)
class Text:
    """The lines of a file."""

    lines: tuple[bytes, ...]

    @classmethod
    def of(cls, data: bytes) -> Text:
        """Split the bytes of a file."""
        lines = data.split(b"\n")
        return cls(tuple(lines[:-1] if lines[-1] == b"" else lines))

    @property
    def ends_in_crlf(self) -> bool:
        """Whether its first line ends in CRLF."""
        return bool(self.lines) and self.lines[0].endswith(b"\r")

    def scope(self, line: int, indent: int) -> Scope:
        """Return the scope of text that stands ``indent`` deep before the line ``line`` (from 1)."""
        names: list[str] = []
        for text in reversed(self.lines[: line - 1]):
            match = _DEFINITION.match(text)
            if match and len(match[1]) < indent:
                names.insert(0, match[2].decode())
                indent = len(match[1])
        return tuple(names)

    def scopes(self) -> Counter[Scope]:
        """Return the scopes that the file has, each with how often it is defined."""
        found: Counter[Scope] = Counter()
        around: list[tuple[int, str]] = []
        for text in self.lines:
            match = _DEFINITION.match(text)
            if match:
                around = [(indent, name) for indent, name in around if indent < len(match[1])]
                around.append((len(match[1]), match[2].decode()))
                found[tuple(name for _, name in around)] += 1
        return found


def _preimage(hunk: Hunk) -> list[bytes]:
    return [line[1:] for line in hunk.lines if line[:1] in (b" ", b"-")]


def places(text: Text, hunk: Hunk) -> list[int]:
    """Return the lines (from 1) at which all that a hunk expects stands in the file."""
    wanted = tuple(_preimage(hunk))
    if not wanted:
        return [hunk.old_start]
    count = len(wanted)
    return [
        at + 1
        for at in range(len(text.lines) - count + 1)
        if text.lines[at] == wanted[0] and text.lines[at : at + count] == wanted
    ]


def changed_lines(hunk: Hunk) -> Iterator[tuple[int, int]]:
    """Yield, for each changed line that is not blank, its offset in the old text and its indentation."""
    offset = 0
    for line in hunk.lines:
        body = line[1:].expandtabs()
        if line[:1] in (b"+", b"-") and body.strip():
            yield offset, len(body) - len(body.lstrip())
        offset += line[:1] in (b" ", b"-")


def scope_of(text: Text, hunk: Hunk, at: int) -> Scope:
    """Return the scope of a hunk's first changed line when the hunk is put at line ``at``."""
    for offset, indent in changed_lines(hunk):
        return text.scope(at + offset, indent)
    return ()


def offsets(said: Sequence[str], files: Sequence[FileDiff]) -> dict[tuple[str, int], int]:
    """Read from what ``git apply --verbose`` said how far it moved each hunk (path, number from 1)."""
    found: dict[tuple[str, int], int] = {}
    at = -1
    for line in said:
        at += line.startswith("Checking patch ")
        match = _OFFSET.match(line)
        if match and at < len(files):
            found[files[at].path, int(match[1])] = int(match[2])
    return found


@dataclass(frozen=True)
class Placed:
    """A hunk of a patch, in the file that it was made from and in the one that it is applied to."""

    hunk: Hunk
    old: Text
    new: Text
    at: int
    """The line (from 1) where it is put in the new file."""

    def is_certain(self, *, merged: bool) -> bool:
        """Say whether the place is the one that was meant; ``merged``: merging puts it there as well."""
        before, after = places(self.old, self.hunk), places(self.new, self.hunk)
        meant = scope_of(self.old, self.hunk, self.hunk.old_start)
        here = scope_of(self.new, self.hunk, self.at)
        if len(before) <= 1 and after == [self.at]:
            return meant == here or merged or meant not in self.new.scopes()
        if [at for at in after if scope_of(self.new, self.hunk, at) == meant] == [self.at]:
            return True
        if not merged or len(before) != len(after):
            return False
        return before.index(self.hunk.old_start) == after.index(self.at)


def strays(old: tuple[Text, FileDiff], new: tuple[Text, FileDiff]) -> set[Scope]:
    """Return the scopes in which a change landed although the one that it was made in is still there.

    Each side is a file before the change, and the change.
    """
    before, after = (_touched(text, diff) for text, diff in (old, new))
    there = new[0].scopes()
    left = {scope for scope in before - after if scope in there}
    return after - before if left else set()


def _touched(text: Text, diff: FileDiff) -> set[Scope]:
    return {
        text.scope(hunk.old_start + offset, indent)
        for hunk in diff.hunks
        for offset, indent in changed_lines(hunk)
    }

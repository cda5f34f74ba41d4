"""Which lines of one version of a file became which lines of another.

All positions are line indexes from 0, spans are half open; what people see counts from 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_stack.git import Git

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
#: Lines that a unified diff shows around a change.
_CONTEXT = 3


@dataclass(frozen=True)
class Span:
    """The lines ``start`` to ``stop``, the last one not included."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, lines: Sequence[str]) -> tuple[str, ...]:
        """Return the lines that the span covers."""
        return tuple(lines[self.start : self.stop])


@dataclass(frozen=True)
class Edit:
    """Lines of the old version that others of the new one took the place of; either may be none."""

    old: Span
    new: Span


@dataclass(frozen=True)
class LineMap:
    """All edits between two versions of a file, in order."""

    edits: tuple[Edit, ...]
    old_length: int
    new_length: int

    def image(self, span: Span) -> Span:
        """Return the smallest span of the new version that stands for ``span`` of the old one.

        Lines that upstream put in right before or behind the span do not belong to it, except at an end of
        the file, where there is no line between that could keep two changes apart.
        """
        start, stop = self._start(span.start), self._stop(span.stop)
        first = 0 if span.start == 0 else min(start, stop)
        last = self.new_length if span.stop == self.old_length else max(start, stop)
        return Span(first, last)

    def _start(self, position: int) -> int:
        shift = 0
        for edit in self.edits:
            if edit.old.stop <= position:
                shift = edit.new.stop - edit.old.stop
            elif edit.old.start <= position:
                return edit.new.start
        return position + shift

    def _stop(self, position: int) -> int:
        shift = 0
        for edit in self.edits:
            if edit.old.start >= position:
                break
            if position < edit.old.stop:
                return edit.new.stop
            shift = edit.new.stop - edit.old.stop
        return position + shift

    def touching(self, span: Span) -> tuple[Edit, ...]:
        """Return the edits whose lines on either side are inside ``span`` and its image."""
        return tuple(edit for edit in self.edits if self._touches(edit, span))

    def _touches(self, edit: Edit, span: Span) -> bool:
        if edit.old.start < span.stop and edit.old.stop > span.start:
            return True
        at = edit.old.start
        if len(edit.old) or not span.start <= at <= span.stop:
            return False
        ends = (0, self.old_length)
        return at not in (span.start, span.stop) or at in ends or len(span) == 0

    def kept(self, line: int) -> int | None:
        """Return where an unchanged line is now, or None for one that an edit took away."""
        here = Span(line, line + 1)
        image = Span(self._start(here.start), self._stop(here.stop))
        gone = any(edit.old.start <= line < edit.old.stop for edit in self.edits)
        return None if gone else image.start

    def inverse(self) -> LineMap:
        """Return the map from the new version to the old one."""
        edits = tuple(Edit(edit.new, edit.old) for edit in self.edits)
        return LineMap(edits, self.new_length, self.old_length)


def identity(length: int) -> LineMap:
    """Return the map between two equal versions."""
    return LineMap((), length, length)


@lru_cache(maxsize=256)
def map_lines(
    git: Git, old: str, new: str, lengths: tuple[int, int], *, ignore_space: bool = False
) -> LineMap:
    """Compare two blobs of a repository, given by their ids and numbers of lines.

    With the algorithm that merging uses, so that what it finds in conflict is an edit here.
    """
    words = ("--unified=0", "--inter-hunk-context=0", "--diff-algorithm=histogram", "--text", "--no-color")
    plain = ("--no-ext-diff", "--no-textconv", "--no-renames", "--ignore-submodules=all")
    space = ("--ignore-all-space",) if ignore_space else ()
    output = git.run("diff", *words, *plain, *space, old, new).stdout
    return LineMap(tuple(_edit(match) for match in _HUNK.finditer(output)), *lengths)


def _edit(match: re.Match[bytes]) -> Edit:
    old_start, new_start = int(match[1]), int(match[3])
    old_count = 1 if match[2] is None else int(match[2])
    new_count = 1 if match[4] is None else int(match[4])
    # An empty side is given by the line before it.
    old = old_start - 1 if old_count else old_start
    new = new_start - 1 if new_count else new_start
    return Edit(Span(old, old + old_count), Span(new, new + new_count))


def unified(old: Sequence[str], new: Sequence[str], lines: LineMap, span: Span) -> tuple[str, ...]:
    """Return the hunks of the unified diff between two versions that touch ``span`` of the old one."""
    touching = set(lines.touching(span))
    groups = (group for group in _grouped(lines.edits) if touching.intersection(group))
    return tuple(line for group in groups for line in _hunk(old, new, group))


def _grouped(edits: Iterable[Edit]) -> list[list[Edit]]:
    """Put edits together that a unified diff shows in one hunk, because their context would meet."""
    groups: list[list[Edit]] = []
    for edit in edits:
        if groups and edit.old.start - groups[-1][-1].old.stop <= 2 * _CONTEXT:
            groups[-1].append(edit)
        else:
            groups.append([edit])
    return groups


def _hunk(old: Sequence[str], new: Sequence[str], group: list[Edit]) -> list[str]:
    before = min(_CONTEXT, group[0].old.start, group[0].new.start)
    after = min(_CONTEXT, len(old) - group[-1].old.stop, len(new) - group[-1].new.stop)
    at = group[0].old.start - before
    body: list[str] = []
    for edit in group:
        body += [f" {line}" for line in old[at : edit.old.start]]
        body += [f"-{line}" for line in edit.old.of(old)]
        body += [f"+{line}" for line in edit.new.of(new)]
        at = edit.old.stop
    body += [f" {line}" for line in old[at : at + after]]
    return [_header(group, before, after), *body]


def _header(group: list[Edit], before: int, after: int) -> str:
    sides = []
    for first, last in ((group[0].old, group[-1].old), (group[0].new, group[-1].new)):
        start, stop = first.start - before, last.stop + after
        sides.append(f"{start + 1 if stop > start else start},{stop - start}")
    return f"@@ -{sides[0]} +{sides[1]} @@"

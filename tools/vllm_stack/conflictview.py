"""Conflicts for people: each hunk like the error of a good compiler."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from vllm_stack.report import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from vllm_stack.conflicts import Excerpt, FileConflict, HunkConflict
    from vllm_stack.gitsource import UpstreamCommit

#: Lines of one section that are shown; the JSON report has all.
_MOST_LINES = 24
#: Lines around a changed one that stay when a section is shortened.
_AROUND = 3
_NARROWEST = 30
_TAB = 4


@dataclass(frozen=True)
class Row:
    """A line of code with its number and a mark."""

    number: int | None
    mark: str
    text: str
    style: str = ""


def printable(text: str) -> str:
    """Return text in which nothing can steer a terminal: escapes stand for all that does not print."""
    return escaped(text.expandtabs(_TAB))


class View:
    """Prints headings, sections of code and remarks, as wide as the console is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # A log keeps whole lines; only a terminal would break them in the middle.
        self._width = max(console.width, _NARROWEST) if console.is_terminal else None

    def heading(self, word: str, text: str, style: str) -> None:
        """Print e.g. ``conflict: FILE hunk 2 of PATH:LINE``."""
        self._console.print(Text.assemble((f"{word}: ", style), (printable(text), "bold")))

    def line(self, text: str) -> None:
        """Print a line as it is, but for what could steer the terminal."""
        self._console.print(Text(printable(text)))

    def section(self, title: str, rows: Sequence[Row], most: int = _MOST_LINES) -> None:
        """Print a title and lines of code with their numbers; of more than ``most`` those that matter."""
        self._console.print(Text(f"  {printable(title)}", style="cyan"))
        digits = max((len(str(row.number)) for row in rows if row.number), default=1)
        for row in _shortened(rows, most):
            self._console.print(self._code(row, digits))
        if not rows:
            self._console.print(Text(f"  {'':{digits}} | (nothing)", style="dim"))

    def _code(self, row: Row | int, digits: int) -> Text:
        if isinstance(row, int):
            return Text(f"  {'':{digits}} | ... {row} lines more ...", style="dim")
        gutter = f"  {row.number or '':>{digits}} | "
        line = f"{row.mark} {printable(row.text)}".rstrip()
        if self._width and len(gutter) + len(line) > self._width:
            line = f"{line[: self._width - len(gutter) - 3]}..."
        return Text.assemble((gutter, "blue"), (line, row.style))

    def remark(self, word: str, text: str) -> None:
        """Print ``note: ...`` or ``help: ...``, wrapped under itself."""
        first = f"  {word}: "
        safe = printable(text)
        lines = [safe]
        if self._width:
            lines = textwrap.wrap(safe, self._width - len(first), break_on_hyphens=False) or [""]
        style = "green" if word == "help" else "yellow"
        self._console.print(Text.assemble((first, style), lines[0]))
        for line in lines[1:]:
            self._console.print(Text(" " * len(first) + line))

    def remarks(self, notes: Iterable[str], commits: Iterable[UpstreamCommit], advice: Iterable[str]) -> None:
        """Print notes, the commits behind them, and what to do next."""
        for note in notes:
            self.remark("note", note)
        for commit in commits:
            self.remark("note", describe_commit(commit))
        for text in advice:
            self.remark("help", text)

    def gap(self) -> None:
        """Print an empty line."""
        self._console.print()


def _shortened(rows: Sequence[Row], most: int) -> Iterator[Row | int]:
    """Yield the rows; in place of those left out their number. Rows near a mark stay first."""
    if len(rows) <= most:
        yield from rows
        return
    marked = [at for at, row in enumerate(rows) if row.mark.strip()] or [0]
    near = sorted({at for mark in marked for at in range(mark - _AROUND, mark + _AROUND + 1)})
    kept = [at for at in near if 0 <= at < len(rows)]
    if len(kept) > most:
        kept = [*kept[: 2 * most // 3], *kept[-(most // 3) :]]
    at = 0
    for row in kept:
        if row > at:
            yield row - at
        yield rows[row]
        at = row + 1
    if at < len(rows):
        yield len(rows) - at


def describe_commit(commit: UpstreamCommit) -> str:
    """Return e.g. ``upstream 0123456789ab (#4711, 2026-01-31): Subject``."""
    pull = f"#{commit.pull_request}, " if commit.pull_request else ""
    # Subjects of squashed pull requests end in the number as well.
    subject = commit.subject.removesuffix(f" (#{commit.pull_request})")
    return f"upstream {commit.id[:12]} ({pull}{commit.date}): {subject}"


def excerpt_rows(excerpt: Excerpt) -> list[Row]:
    """Return the lines of an excerpt; ``~`` marks those that the other release does not have."""
    changed = set(excerpt.changed)
    numbered = enumerate(excerpt.lines, excerpt.start)
    return [
        Row(number, "~", line, "magenta") if number in changed else Row(number, " ", line)
        for number, line in numbered
    ]


def diff_rows(lines: Iterable[str]) -> list[Row]:
    """Return the lines of a diff, coloured by their first character."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    return [
        Row(None, "@@", line[2:].removeprefix(" "), "cyan")
        if line.startswith("@@")
        else Row(None, line[:1] or " ", line[1:], styles.get(line[:1], ""))
        for line in lines
    ]


def render_conflicts(console: Console, conflicts: Sequence[FileConflict]) -> None:
    """Print the files of one patch that keep it from applying, and in a few lines what would apply."""
    view = View(console)
    for file in conflicts:
        if file.conflicting:
            _render_file(view, file)
    _render_rest(view, conflicts)


def _render_file(view: View, file: FileConflict) -> None:
    hunks = [hunk for hunk in file.hunks if hunk.outcome in _TROUBLE]
    if file.status != "modified" or not hunks or file.notes:
        text = f"{file.patch}: {file.path}: {_STATUS[file.status]} {file.new_release}"
        view.heading("conflict", text, "bold red")
        view.remarks(file.notes, (), file.help)
        view.gap()
    for hunk in hunks:
        _render_hunk(view, file, hunk)


_TROUBLE = ("conflict", "doubtful")
#: What a status says between the path and the release.
_STATUS = {
    "modified": "otherwise in",
    "renamed": "under another name in",
    "deleted": "not in",
    "appeared": "the name is taken in",
    "missing": "not there on",
    "added": "new on",
}


def _render_hunk(view: View, file: FileConflict, hunk: HunkConflict) -> None:
    where = file.new_path or file.path
    inside = f", in `{hunk.within}`" if hunk.within else ""
    text = f"{file.patch} hunk {hunk.number} of {where}:{hunk.line}{inside}"
    view.heading("conflict" if hunk.outcome == "conflict" else "doubt", text, "bold red")
    if hunk.old_upstream:
        title = f"the patch was made for {file.old_release} (~ not in {file.new_release})"
        view.section(title, excerpt_rows(hunk.old_upstream))
    if hunk.new_upstream:
        title = f"upstream {file.new_release} has (~ not in {file.old_release})"
        view.section(title, excerpt_rows(hunk.new_upstream))
    view.section("the patch wants", diff_rows(hunk.ours))
    view.remarks(hunk.notes, hunk.commits, hunk.help)
    view.gap()


def _render_rest(view: View, conflicts: Sequence[FileConflict]) -> None:
    """Name the hunks that would apply alone, so that nobody looks for a fault in them."""
    for file in conflicts:
        fitting = [hunk for hunk in file.hunks if hunk.outcome not in _TROUBLE]
        words = ", ".join(map(_fitting, fitting))
        where = file.new_path or file.path
        if fitting:
            plural = "s" if len(fitting) > 1 else ""
            view.remark("note", f"no conflict: {file.patch} hunk{plural} {words} of {where}")
        elif file.status == "added":
            view.remark("note", f"no conflict: {file.patch}: new file {file.path}")


def _fitting(hunk: HunkConflict) -> str:
    return f"{hunk.number} (line {hunk.line}{', there already' if hunk.outcome == 'absorbed' else ''})"

"""Patch files: what ``git format-patch`` wrote, parsed without git so that faults can be named.

The parser never stops at a fault: it collects what is wrong, so that ``lint`` can report all of it.
"""

from __future__ import annotations

import email.errors
import email.header
import email.parser
import email.utils
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vllm_stack.hashing import sha256_bytes

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
#: A trailer of a commit message.
TRAILER = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Za-z]+)*): (\S.*)$")
#: Where git takes the message to end (``git mailinfo``).
_SEPARATOR = re.compile(rb"^(?:---[ \t]*\r?$|diff -|Index: )", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a patch file."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True)
class Hunk:
    """One hunk; ``lines`` keep their first character."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]
    line: int
    """Line number of the ``@@`` in the patch file, from 1."""


@dataclass(frozen=True)
class FileDiff:
    """The change of one file."""

    path: str
    status: Literal["A", "M", "D"]
    hunks: tuple[Hunk, ...]
    line: int


@dataclass(frozen=True)
class Patch:
    """A patch file of a stack."""

    name: str
    data: bytes = field(repr=False)

    @property
    def sha256(self) -> str:
        """Hash of the file's bytes."""
        return sha256_bytes(self.data)

    @cached_property
    def _parts(self) -> tuple[bytes, bytes, int]:
        """Mail header and message, diff, and the number of lines before the diff."""
        separator = _SEPARATOR.search(self.data)
        start = separator.start() if separator else len(self.data)
        return self.data[:start], self.data[start:], self.data[:start].count(b"\n")

    @cached_property
    def _mail(self) -> email.message.Message:
        head = self._parts[0]
        if head.startswith(b"From "):
            head = head.partition(b"\n")[2]
        return email.parser.BytesParser().parsebytes(head)

    def _header(self, name: str) -> str:
        return re.sub(r"\r?\n[ \t]+", " ", str(self._mail.get(name, ""))).strip()

    @property
    def subject(self) -> str:
        """Subject line, unfolded and decoded."""
        return _decoded(self._header("Subject"))

    @property
    def author(self) -> str:
        """Author as ``Name <address>``, without the quoting that mail needs for some names."""
        name, address = email.utils.parseaddr(self._header("From"))
        return f"{_decoded(name)} <{address}>"

    @cached_property
    def message(self) -> str:
        """Commit message without the subject."""
        payload = self._mail.get_payload(decode=True)
        return (payload if isinstance(payload, bytes) else b"").decode("utf-8", "replace").strip("\r\n")

    @property
    def full_message(self) -> str:
        """Commit message with its subject, as git keeps it."""
        return f"{self.subject}\n\n{self.message}\n" if self.message else f"{self.subject}\n"

    @cached_property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Trailers of the message's last paragraph, in order; continuation lines are joined."""
        found: list[tuple[str, str]] = []
        for line in self.last_paragraph:
            match = TRAILER.match(line)
            if match:
                found.append((match[1], match[2].strip()))
            elif line.startswith(" ") and found:
                key, value = found[-1]
                found[-1] = (key, f"{value} {line.strip()}")
        return tuple(found)

    def trailer(self, key: str) -> str | None:
        """Return the value of the first trailer ``key``, or None."""
        return next((value for name, value in self.trailers if name == key), None)

    @cached_property
    def last_paragraph(self) -> tuple[str, ...]:
        """Lines of the message's last paragraph, where the trailers stand."""
        return tuple(self.message.replace("\r\n", "\n").split("\n\n")[-1].splitlines())

    @property
    def topic(self) -> str | None:
        """The topic that the patch says it belongs to."""
        return self.trailer("Topic")

    @cached_property
    def _parsed(self) -> tuple[tuple[FileDiff, ...], tuple[Problem, ...]]:
        _, diff, offset = self._parts
        reader = _DiffReader(diff, offset)
        reader.read()
        return tuple(reader.files), tuple(reader.problems)

    @property
    def files(self) -> tuple[FileDiff, ...]:
        """The changed files, in order."""
        return self._parsed[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the changed files, in order."""
        return tuple(file.path for file in self.files)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the form of the file."""
        return self._parsed[1]

    def same_but_for_date(self, other: bytes) -> bool:
        """Say whether ``other`` differs only in what changes when a commit is rewritten as it was."""
        return _undated(self.data) == _undated(other)


def _decoded(text: str) -> str:
    """Decode a header; one that is not valid stays as it is, and lint refuses the patch for its form."""
    try:
        return str(email.header.make_header(email.header.decode_header(text))).strip()
    except (email.errors.HeaderParseError, LookupError, UnicodeDecodeError):
        return text


def _undated(data: bytes) -> bytes:
    header, _, rest = data.partition(b"\n\n")
    kept = [line for line in header.split(b"\n") if not line.startswith((b"From ", b"Date: "))]
    return b"\n".join(kept) + b"\n\n" + rest


class _DiffReader:
    """Reads the diffs of one patch, line by line."""

    def __init__(self, diff: bytes, offset: int) -> None:
        self._lines = diff.split(b"\n")
        if self._lines[-1] == b"":
            self._lines.pop()
        self._offset = offset
        self._at = 0
        self.files: list[FileDiff] = []
        self.problems: list[Problem] = []

    def _number(self, at: int) -> int:
        return self._offset + at + 1

    def _fault(self, code: str, message: str, at: int) -> None:
        self.problems.append(Problem(code, message, self._number(at)))

    def _current(self) -> bytes | None:
        return self._lines[self._at] if self._at < len(self._lines) else None

    def read(self) -> None:
        """Read all diffs."""
        while (line := self._current()) is not None:
            if line.startswith(b"diff --git "):
                self._read_file()
                continue
            if line.startswith((b"--- a", b"--- /", b"+++ ", b"@@ ")):
                self._fault("stray-line", f"not inside a diff: {_shown(line)}", self._at)
            self._at += 1
        if not self.files:
            self._fault("no-diff", "the patch changes nothing", max(len(self._lines) - 1, 0))

    def _read_file(self) -> None:
        start = self._at
        self._crlf(start)
        path = self._path_of_header(self._lines[start].rstrip(b"\r"), start)
        self._at += 1
        status = self._read_extended_header(path)
        hunks: list[Hunk] = []
        while (line := self._current()) is not None and line.startswith(b"@@ "):
            hunks.append(self._read_hunk(path, len(hunks) + 1))
            self._skip_surplus(path, len(hunks))
        self.files.append(FileDiff(path, status, tuple(hunks), self._number(start)))

    def _read_extended_header(self, path: str) -> Literal["A", "M", "D"]:
        """Read up to the first hunk; a binary patch's data is passed over."""
        status: Literal["A", "M", "D"] = "M"
        while (line := self._current()) is not None and not line.startswith((b"@@ ", b"diff --git ")):
            if line.startswith(b"new file mode"):
                status = "A"
            elif line.startswith(b"deleted file mode"):
                status = "D"
            elif line.startswith((b"--- ", b"+++ ")):
                self._crlf(self._at)
                self._check_prefix(line.rstrip(b"\r"), path)
            self._at += 1
        return status

    def _path_of_header(self, line: bytes, at: int) -> str:
        """Take the path out of ``diff --git a/P b/P``; both are the same, as renames are off."""
        words = line[len(b"diff --git ") :]
        half = len(words) // 2
        old, new = words[:half], words[half + 1 :]
        quoted = old.startswith(b'"')
        marks = (b'"a/', b'"b/') if quoted else (b"a/", b"b/")
        if not (
            old.startswith(marks[0])
            and new.startswith(marks[1])
            and old[len(marks[0]) :] == new[len(marks[1]) :]
        ):
            if not (words.startswith(b"a/") and b" b/" in words):
                self._fault("prefix", f"paths must be a/<path> b/<path>: {_shown(line)}", at)
            else:
                message = "two paths: write renames and copies with refresh, as deletion and addition"
                self._fault("rename", f"{message}: {_shown(line)}", at)
            return _shown(new or words)
        raw = new[len(marks[1]) :]
        path = _unquote(raw[:-1]) if quoted else raw.decode("utf-8", "replace")
        if path.startswith("/") or not {"..", ".", "", ".git"}.isdisjoint(path.split("/")):
            self._fault("path", f"{path!r} leads out of the tree", at)
        return path

    def _check_prefix(self, line: bytes, path: str) -> None:
        name = line[4:].split(b"\t")[0].lstrip(b'"')
        if name != b"/dev/null" and not name.startswith(b"a/" if line.startswith(b"---") else b"b/"):
            self._fault("prefix", f"{path}: no a/ or b/ before the path: {_shown(line)}", self._at)

    def _crlf(self, at: int) -> None:
        if self._lines[at].endswith(b"\r"):
            self._fault("crlf", "line ends in CRLF", at)

    def _read_hunk(self, path: str, ordinal: int) -> Hunk:
        at = self._at
        self._crlf(at)
        match = _HUNK.match(self._lines[at])
        self._at += 1
        if match is None:
            self._fault(
                "hunk-header", f"{path}: hunk {ordinal}: not a hunk header: {_shown(self._lines[at])}", at
            )
            return Hunk(0, 0, 0, 0, (), self._number(at))
        old_start, new_start = int(match[1]), int(match[3])
        old_count, new_count = int(match[2] or 1), int(match[4] or 1)
        lines = self._hunk_lines(old_count, new_count)
        hunk = Hunk(old_start, old_count, new_start, new_count, lines, self._number(at))
        self._check_counts(path, ordinal, hunk, at)
        self._check_added(path, hunk, at)
        return hunk

    def _hunk_lines(self, old_count: int, new_count: int) -> tuple[bytes, ...]:
        taken: list[bytes] = []
        old = new = 0
        while (line := self._current()) is not None:
            kind = line[:1]
            if kind == b"\\":
                taken.append(line)
            elif (old >= old_count and new >= new_count) or kind not in (b" ", b"+", b"-"):
                break
            else:
                old += kind in (b" ", b"-")
                new += kind in (b" ", b"+")
                taken.append(line)
            self._at += 1
        return tuple(taken)

    def _skip_surplus(self, path: str, ordinal: int) -> None:
        """Pass over lines that belong to no hunk by its counts, and say so once."""
        at = self._at
        while (line := self._current()) is not None and not line.startswith((b"@@ ", b"diff --git ")):
            self._at += 1
        if self._at > at:
            surplus = self._at - at
            self._fault(
                "hunk-count", f"{path}: hunk {ordinal}: {surplus} lines more than its header says", at
            )

    def _check_counts(self, path: str, ordinal: int, hunk: Hunk, at: int) -> None:
        old = sum(line[:1] in (b" ", b"-") for line in hunk.lines)
        new = sum(line[:1] in (b" ", b"+") for line in hunk.lines)
        if (old, new) != (hunk.old_count, hunk.new_count):
            said, found = f"-{hunk.old_count} +{hunk.new_count}", f"-{old} +{new}"
            self._fault("hunk-count", f"{path}: hunk {ordinal}: header says {said} lines, it has {found}", at)

    def _check_added(self, path: str, hunk: Hunk, at: int) -> None:
        upstream_crlf = any(line.endswith(b"\r") and line[:1] in (b" ", b"-") for line in hunk.lines)
        for offset, line in enumerate(hunk.lines, start=at + 1):
            if line[:1] != b"+":
                continue
            text = line[1:]
            if text.endswith(b"\r") and not upstream_crlf:
                self._fault("crlf", f"{path}: added line ends in CRLF", offset)
            if text.rstrip(b"\r") != text.rstrip(b"\r").rstrip(b" \t"):
                self._fault("trailing-whitespace", f"{path}: added line ends in white space", offset)


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")[:80]


def _unquote(raw: bytes) -> str:
    """Undo git's C-style quoting of a path."""
    text = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), raw)
    escapes = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\"}
    text = re.sub(rb'\\([ntr"\\])', lambda found: escapes[found[1]], text)
    return text.decode("utf-8", "replace")

"""The rules of a stack, checked without applying it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.classify import PathClass, classify
from vllm_stack.patch import TRAILER, Patch
from vllm_stack.resolutions import FOLDER as RESOLUTIONS
from vllm_stack.series import FILE_NAME, SeriesEntry
from vllm_stack.stack import SERIES_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.stack import Stack

#: Upstream's rule for the title of a pull request (its pre-commit configuration).
_SUBJECT = re.compile(r"^(\[[^][]+\])+ +\S.*$")
_STATUS = re.compile(r"^(Pending|Submitted https://\S+|Backport https://\S+|Inappropriate \S.*)$")
_REQUIRED = ("Topic", "Upstream-Status", "Drop-When", "Why-Not-Plugin", "Signed-off-by")
_KNOWN = (*_REQUIRED, "Co-authored-by", "Assisted-by")
_SINGLE = ("Topic", "Upstream-Status", "Drop-When", "Why-Not-Plugin")


@dataclass(frozen=True)
class Finding:
    """One thing that lint found. A note informs; an error fails."""

    code: str
    level: str
    patch: str | None
    message: str
    line: int | None = None

    @property
    def is_error(self) -> bool:
        """Whether the finding makes lint fail."""
        return self.level == "error"

    def __str__(self) -> str:
        place = self.patch or SERIES_FILE
        return f"{place}{'' if self.line is None else f':{self.line}'}: {self.message} [{self.code}]"


@dataclass(frozen=True)
class ClassifiedPath:
    """A path that a patch touches, and what it is to an overlay wheel."""

    patch: str
    path: str
    kind: PathClass


def _error(code: str, patch: str | None, message: str, line: int | None = None) -> Finding:
    return Finding(code, "error", patch, message, line)


def lint_stack(stack: Stack, *, on_disk: bool = True) -> list[Finding]:
    """Return all findings of a stack; ``on_disk`` also compares the series with the folder."""
    findings = list(_lint_series(stack))
    if on_disk:
        findings += _lint_folder(stack)
    for patch, entry in zip(stack.patches, stack.series.patches, strict=True):
        findings += lint_patch(stack, patch, entry)
    return findings


def classified_paths(stack: Stack) -> tuple[ClassifiedPath, ...]:
    """Return every path that the stack touches, with its class."""
    return tuple(
        ClassifiedPath(patch.name, path, classify(path, stack.pin.layout))
        for patch in stack.patches
        for path in patch.paths
    )


def _lint_series(stack: Stack) -> Iterator[Finding]:
    numbers = Counter(entry.number for entry in stack.series.patches if entry.number is not None)
    for number, times in numbers.items():
        if times > 1:
            yield _error("duplicate-number", None, f"number {number:04d} is used by {times} patches")
    for kind, values in (
        ("subject", Counter(patch.subject for patch in stack.patches)),
        ("content", Counter(patch.data for patch in stack.patches)),
    ):
        for value, times in values.items():
            if times > 1:
                names = [patch.name for patch in stack.patches if value in (patch.subject, patch.data)]
                yield _error(f"duplicate-{kind}", None, f"{' and '.join(names)} have the same {kind}")


def _lint_folder(stack: Stack) -> Iterator[Finding]:
    listed = {entry.file for entry in stack.series.patches} | {SERIES_FILE, RESOLUTIONS}
    for path in sorted(stack.directory.iterdir()):
        if path.name not in listed:
            yield _error("orphan", None, f"{path.name} lies in the folder and is not in the series")


def lint_patch(stack: Stack, patch: Patch, entry: SeriesEntry) -> Iterator[Finding]:
    """Return what is wrong with one patch of a stack."""
    for problem in patch.problems:
        yield _error(problem.code, patch.name, problem.message, problem.line)
    yield from _lint_header(patch)
    yield from _lint_name(stack, patch, entry)
    yield from _lint_trailers(patch, entry)
    for path in patch.paths:
        if classify(path, stack.pin.layout) is PathClass.NATIVE:
            message = f"{path} is native: an overlay wheel cannot hold it"
            yield Finding("native", "note", patch.name, message)


def _lint_header(patch: Patch) -> Iterator[Finding]:
    head = patch.data.partition(b"\n\n")[0]
    if b"\r" in head:
        yield _error("crlf", patch.name, "the header's lines end in CRLF", 1)
    if not head.startswith(b"From " + b"0" * 40 + b" "):
        yield _error(
            "from-line", patch.name, "does not begin with the zero commit: not written by refresh", 1
        )
    if not _SUBJECT.match(patch.subject):
        yield _error("subject", patch.name, f"subject is not `[Tag] text`: {patch.subject!r}")
    if not patch.message or patch.message.split("\n\n")[0].startswith(tuple(f"{key}: " for key in _REQUIRED)):
        yield _error("reason", patch.name, "the message gives no reason for the change")


def _lint_name(stack: Stack, patch: Patch, entry: SeriesEntry) -> Iterator[Finding]:
    match = FILE_NAME.match(patch.name)
    topic = stack.series.topic(entry.topic)
    if match is None:
        yield _error("name", patch.name, "must be called NNNN-topic-name.patch")
    if topic is None:
        yield _error("topic", patch.name, f"the series has no topic {entry.topic}")
    if match is None or topic is None:
        return
    first, last = topic.numbers
    if not first <= int(match["number"]) <= last:
        yield _error("number", patch.name, f"topic {topic.name} has the numbers {first:04d} to {last:04d}")
    if not match["rest"].startswith(f"{topic.name}-"):
        yield _error("name", patch.name, f"the name does not go on with its topic, {topic.name}")


def _lint_trailers(patch: Patch, entry: SeriesEntry) -> Iterator[Finding]:
    counts = Counter(key for key, _ in patch.trailers)
    for key in _REQUIRED:
        if not counts[key]:
            yield _error("trailer-missing", patch.name, f"trailer {key} is missing")
    yield from _lint_last_paragraph(patch)
    for key in counts:
        if key not in _KNOWN:
            yield _error("trailer-unknown", patch.name, f"trailer {key} is not one of {', '.join(_KNOWN)}")
    for key in _SINGLE:
        if counts[key] > 1:
            yield _error("trailer-twice", patch.name, f"trailer {key} stands {counts[key]} times")
    status = patch.trailer("Upstream-Status")
    if status is not None and not _STATUS.match(status):
        allowed = "Pending | Submitted <url> | Backport <url> | Inappropriate <reason>"
        yield _error("upstream-status", patch.name, f"Upstream-Status is {status!r}, not {allowed}")
    if patch.topic is not None and patch.topic != entry.topic:
        yield _error("topic", patch.name, f"says topic {patch.topic}, the series says {entry.topic}")
    signed = [value for key, value in patch.trailers if key == "Signed-off-by"]
    if signed and patch.author not in signed:
        yield _error("sign-off", patch.name, f"no Signed-off-by of its author, {patch.author}")


def _lint_last_paragraph(patch: Patch) -> Iterator[Finding]:
    """Where trailers stand nothing else may: a line that is none is a misspelt or a wrapped one."""
    if not patch.trailers:
        return
    for line in patch.last_paragraph:
        if not line.startswith(" ") and TRAILER.match(line) is None:
            message = f"not a trailer (indent it if it belongs to the one above): {line!r}"
            yield _error("trailer-line", patch.name, message)

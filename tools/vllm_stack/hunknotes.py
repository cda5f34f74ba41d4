"""What can be said of a hunk's place in words: notes on upstream's change, and what to do next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from vllm_stack.fileversions import hunk_span, shown
from vllm_stack.linemap import Span
from vllm_stack.moved import defines, enclosing_definition, find_code, overlaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_stack.fileversions import FileVersions, Version
    from vllm_stack.moved import Definition, Elsewhere
    from vllm_stack.patch import Hunk, Patch
    from vllm_stack.replay import PatchPlace

#: Added lines shorter than this (brackets, blank lines) do not tell whether a change is there.
_TELLING_LENGTH = 8
#: Lines around a hunk's place that may hold what upstream took of it.
_NEARBY = 20


def describe_origin(place: PatchPlace, versions: FileVersions, span: Span) -> tuple[str, ...]:
    """Say which lines of a hunk's place are earlier patches' work, and how they are numbered."""
    if versions.back is None or versions.old is None:
        return ("the file comes from an earlier patch of the stack",)
    if not versions.back.edits:
        return ()
    release = versions.back.image(span)
    notes = [f"numbers count the stack's earlier patches; bare, these are lines {_range(release)}"]
    if versions.back.touching(span):
        subjects = _earlier_subjects(place, versions.made_for.path, span)
        notes += [f"an earlier patch wrote some of these lines: {subject}" for subject in subjects]
    return tuple(notes)


def _range(span: Span) -> str:
    return f"{span.start + 1}-{span.stop}" if span else f"before {span.start + 1}"


def _earlier_subjects(place: PatchPlace, path: str, span: Span) -> tuple[str, ...]:
    if not span:
        return ()
    where = f"-L{span.start + 1},{span.stop}"
    commits = f"{place.old_base}..{place.old_before}"
    said = place.git.run("blame", "--line-porcelain", where, commits, "--", path).stdout
    subjects: dict[str, None] = {}
    boundary = False
    for line in said.split(b"\n"):
        if line.startswith(b"\t"):
            boundary = False
        elif line == b"boundary":
            boundary = True
        elif line.startswith(b"summary "):
            summary = shown(line.removeprefix(b"summary "))
        elif line.startswith(b"filename ") and not boundary:
            subjects.setdefault(summary)
    return tuple(subjects)


def describe_change(versions: FileVersions, span: Span, image: Span, release: str) -> tuple[str, ...]:
    """Say in words how the place looks in the new release."""
    before, after = span.of(versions.made_for.lines), image.of(versions.found.lines)
    if before and not after:
        return (f"{release} has none of these lines here",)
    return () if before == after else tuple(_kind(before, after))


def describe_presence(hunk: Hunk, found: Version, image: Span) -> tuple[str, ...]:
    """Say so when a good part of what a hunk adds stands at its place already."""
    near = Span(max(0, image.start - _NEARBY), image.stop + _NEARBY).of(found.lines)
    there = {line.strip() for line in near}
    removed = {shown(line[1:]).strip() for line in hunk.lines if line[:1] != b"+"}
    added = {shown(line[1:]).strip() for line in hunk.lines if line[:1] == b"+"} - removed
    telling = [line for line in added if len(line) >= _TELLING_LENGTH]
    count = sum(line in there for line in telling)
    if count * 3 < len(telling) or not count:
        return ()
    return (f"{count} of the {len(telling)} different lines that the hunk adds are there already",)


def _kind(before: Sequence[str], after: Sequence[str]) -> list[str]:
    if [line.rstrip("\r") for line in before] == [line.rstrip("\r") for line in after]:
        ending = "CRLF" if sum(line.endswith("\r") for line in after) else "LF"
        return [f"only the line endings differ: upstream's are {ending} now"]
    if "".join("".join(before).split()) == "".join("".join(after).split()):
        return ["only white space and line breaks differ"]
    if Counter(before) == Counter(after):
        return ["the same lines, in another order"]
    return []


@dataclass(frozen=True)
class Lost:
    """A place whose lines are mostly not where they should be."""

    definition: str | None
    """The definition around them, e.g. ``def name``."""
    begins: int | None
    """Where the file has that definition now, from 1."""
    elsewhere: Elsewhere | None


def surrounding(made_for: Version, hunk: Hunk) -> Definition | None:
    """Return the Python definition that the first changed line of a hunk is in."""
    if not made_for.path.endswith(".py"):
        return None
    before = next((at for at, line in enumerate(hunk.lines) if line[:1] in (b"+", b"-")), 0)
    # An added line belongs to what the line before it is in.
    at = hunk_span(hunk).start + before - (hunk.lines[before][:1] == b"+")
    return enclosing_definition(made_for.lines, at) if 0 <= at < len(made_for.lines) else None


def look_for(
    place: PatchPlace, made_for: Version, found: Version | None, hunk: Hunk, image: Span
) -> Lost | None:
    """Look for where the lines of a hunk's place went; None when most of them are where they should be."""
    telling = [line for line in hunk_span(hunk).of(made_for.lines) if line.strip()]
    there = {line.strip() for line in image.of(found.lines)} if found else set()
    if sum(line.strip() in there for line in telling) * 2 > len(telling):
        return None
    definition = surrounding(made_for, hunk)
    begins = _line_of(found, definition) if found and definition else None
    bases, suffix = (place.old_base, place.new_base), PurePosixPath(made_for.path).suffix
    hit = find_code(place.git, bases, telling, None if begins else definition, suffix)
    if hit and found and overlaps(hit, found.path, image):
        hit = None
    return Lost(str(definition) if definition else None, begins, hit)


def _line_of(found: Version, definition: Definition) -> int | None:
    """Return where a file has a definition of that name inside the same others, from 1."""
    own = (definition.kind, definition.name)
    at = (at for at, line in enumerate(found.lines) if defines(line) == own)
    return next((line + 1 for line in at if enclosing_definition(found.lines, line) == definition), None)


def describe_loss(lost: Lost | None, path: str, release: str) -> tuple[str, ...]:
    """Say where the definition around a place is now, or that the file has it no more."""
    if lost is None or lost.definition is None:
        return ()
    if lost.begins is None:
        return (f"{path} has no `{lost.definition}` in {release}",)
    return (f"`{lost.definition}` begins at {path}:{lost.begins} in {release}",)


def suggest(patch: Patch, hunk: Hunk, lost: Lost | None, where: str, release: str) -> str:
    """Say what to do about a hunk in conflict; ``where`` is its place now, as path:line."""
    if lost is None:
        return f"make the patch's change to the lines at {where}"
    if lost.elsewhere:
        there = lost.elsewhere
        what = f"`{there.definition}`" if there.definition else f"{there.found} of {there.of} of the lines"
        return f"make the change at {there.path}:{there.line}, which has {what}"
    if not any(line[:1] == b"-" for line in hunk.lines):
        return f"the hunk only adds lines: put them where they belong now, at or near {where}"
    instead = "leave the hunk out, or make its change to what is there instead"
    return f"{release} does not have what the hunk changes: {instead}{going(patch)}"


def going(patch: Patch) -> str:
    """Say when the patch as a whole may go, as the end of a sentence."""
    when = patch.trailer("Drop-When")
    return f"; the whole patch goes when {when}" if when else ""

"""What upstream did to the places that a patch changes, and which of its hunks that stops.

Everything is a plain value: :mod:`vllm_stack.conflictview` shows it to people, reports carry it as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vllm_stack.applying import Outcome
from vllm_stack.carrying import Attempt, carry
from vllm_stack.fileversions import FileVersions, HunkOutcome, Version, hunk_span, shown
from vllm_stack.hunknotes import (
    describe_change,
    describe_loss,
    describe_origin,
    describe_presence,
    going,
    look_for,
    suggest,
    surrounding,
)
from vllm_stack.linemap import LineMap, Span, unified
from vllm_stack.moved import Elsewhere, renames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_stack.git import Git
    from vllm_stack.gitsource import History, UpstreamCommit
    from vllm_stack.moved import Definition
    from vllm_stack.patch import FileDiff, Hunk
    from vllm_stack.replay import PatchPlace

Status = Literal["modified", "renamed", "deleted", "appeared", "missing", "added"]
"""``missing`` files were made by an earlier patch of the stack that is not there; ``added`` ones are free."""
#: Lines shown on each side of a place that has none.
_AROUND = 3
_NAMED_HUNK = re.compile(r": hunk (\d+) ")
_IMPORTED = re.compile(r"^Import \S+ (\S+)$")


@dataclass(frozen=True)
class Excerpt:
    """Lines of one version of a file."""

    start: int
    """Number of the first line, from 1."""
    lines: tuple[str, ...]
    changed: tuple[int, ...] = ()
    """Numbers of those lines that the other release does not have."""


@dataclass(frozen=True)
class HunkConflict:
    """A hunk, the place that it was made for, and the place now."""

    number: int
    """Position in the patch's changes of this file, from 1."""
    header: str
    outcome: HunkOutcome
    """What merging this hunk alone gives."""
    line: int
    """Where it goes in the new release, or went in the old one if the file is not there, from 1."""
    ours: tuple[str, ...]
    """The lines of the patch, each with its first character."""
    old_upstream: Excerpt | None
    new_upstream: Excerpt | None
    upstream_change: tuple[str, ...]
    """Unified diff of the region between the bare releases; from our file to upstream's if that appeared."""
    commits: tuple[UpstreamCommit, ...] = ()
    elsewhere: Elsewhere | None = None
    """Where the lines, or the definition around them, seem to be now."""
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()
    within: str | None = None
    """The Python definition that it changes, in the old release, e.g. ``def name``."""


@dataclass(frozen=True)
class FileConflict:
    """One file of a patch against another release."""

    patch: str
    path: str
    new_path: str | None
    """Where the new release has it; None when it has it nowhere."""
    status: Status
    conflicting: bool
    """Whether this file keeps the patch from applying."""
    old_release: str
    new_release: str
    hunks: tuple[HunkConflict, ...]
    similarity: int | None = None
    """Of a renamed file, per cent."""
    notes: tuple[str, ...] = ()
    help: tuple[str, ...] = ()


def explain_conflict(
    place: PatchPlace,
    history: History | None = None,
    *,
    all_commits: bool = False,
    attempt: Attempt | None = None,
) -> tuple[FileConflict, ...]:
    """Return what became of each file of a patch on the new release.

    With ``history`` hunks that conflict name the commits that touched their lines, and with ``all_commits``
    those too that apply. ``attempt`` is what carrying the patch to that place gave, where that is known.
    """
    with place.git.opened() as git:
        place = replace(place, git=git)
        if attempt is None:
            attempt = carry(git, place.patch, place.old_before, place.old_after, place.new_before)
        reader = _Reader(place, history, attempt, all_commits=all_commits)
        return tuple(reader.examine(file) for file in place.patch.files)


@lru_cache(maxsize=64)
def release_of(git: Git, commit: str) -> str:
    """Return the release that a base was imported from, as its commit says; else the short commit id."""
    match = _IMPORTED.match(git.run("log", "-1", "--format=%s", commit).text)
    return match[1] if match else commit[:12]


@dataclass(frozen=True)
class _Reader:
    """Examines the files of one patch."""

    place: PatchPlace
    history: History | None
    attempt: Attempt
    """What carrying the patch gave: it has the last word on what conflicts."""
    all_commits: bool

    def _version(self, commit: str, path: str) -> Version | None:
        version = Version(self.place.git, commit, path)
        return version if version.blob else None

    def _result(
        self, file: FileDiff, status: Status, new_path: str | None, *, conflicting: bool
    ) -> FileConflict:
        place = self.place
        return FileConflict(
            place.patch.name,
            file.path,
            new_path,
            status,
            conflicting,
            release_of(place.git, place.old_base),
            release_of(place.git, place.new_base),
            (),
        )

    def examine(self, file: FileDiff) -> FileConflict:
        """Return what became of one file."""
        if file.status == "A":
            return self._examine_added(file)
        made_for = self._version(self.place.old_before, file.path)
        if made_for is None:
            result = self._result(file, "missing", None, conflicting=True)
            return replace(result, notes=("the patch does not belong to the old release: it lacks the file",))
        found = self._version(self.place.new_before, file.path)
        if found is not None:
            hunks = self._hunks(file, self._versions(made_for, found))
            result = replace(self._result(file, "modified", file.path, conflicting=False), hunks=hunks)
            return self._agreed(result)
        return self._examine_absent(file, made_for)

    def _agreed(self, result: FileConflict) -> FileConflict:
        """Bring what hunks alone give in line with what carrying the whole patch gave."""
        listed = {stages.path for stages in self.attempt.conflicts} & {result.path, result.new_path}
        if any(hunk.outcome == "conflict" for hunk in result.hunks):
            return replace(result, conflicting=True)
        # What only seems to be absorbed is for a person to confirm; its hunks say so themselves.
        return self._doubtful(result) if listed and self.attempt.outcome is Outcome.CONFLICT else result

    def _doubtful(self, result: FileConflict) -> FileConflict:
        """Mark what merges hunk by hunk and yet is for a person to place."""
        said = [text for text in self.attempt.messages if text.startswith(f"{result.path}:")]
        named = {int(number) for text in said for number in _NAMED_HUNK.findall(text)}
        named = named or {hunk.number for hunk in result.hunks if hunk.outcome == "absorbed"}
        hunks = tuple(
            replace(hunk, outcome="doubtful") if hunk.number in named or not named else hunk
            for hunk in result.hunks
        )
        notes = (*result.notes, *(said or self.attempt.messages))
        return replace(result, conflicting=True, hunks=hunks, notes=notes)

    def _versions(self, made_for: Version, found: Version) -> FileVersions:
        old = self._version(self.place.old_base, made_for.path)
        new = self._version(self.place.new_base, found.path)
        return FileVersions(made_for, found, old, new)

    def _examine_absent(self, file: FileDiff, made_for: Version) -> FileConflict:
        if self._version(self.place.old_base, file.path) is None:
            result = self._result(file, "missing", None, conflicting=True)
            note = "an earlier patch of the stack makes this file; it is not applied here"
            return replace(result, notes=(note,), help=("mend that patch first, then this one applies",))
        rename = renames(self.place.git, self.place.old_base, self.place.new_base).get(file.path)
        found = self._version(self.place.new_before, rename.path) if rename else None
        if rename is None or found is None:
            return self._examine_deleted(file, made_for)
        hunks = self._hunks(file, self._versions(made_for, found))
        fitting = sum(hunk.outcome != "conflict" for hunk in hunks)
        result = replace(
            self._result(file, "renamed", rename.path, conflicting=False),
            similarity=rename.similarity,
            hunks=hunks,
        )
        note = f"{result.new_release} has it as {rename.path} ({rename.similarity} % the same)"
        advice = f"make the change in {rename.path}: {fitting} of {len(hunks)} hunks fit there"
        return self._agreed(replace(result, notes=(note,), help=(advice,)))

    def _examine_deleted(self, file: FileDiff, made_for: Version) -> FileConflict:
        result = self._result(file, "deleted", None, conflicting=True)
        if file.status == "D":
            return replace(
                result,
                notes=(f"{result.new_release} does not have it either",),
                help=("nothing is left of this part of the patch: take it out",),
            )
        hunks = tuple(self._gone(made_for, hunk, number) for number, hunk in enumerate(file.hunks, 1))
        return replace(
            result,
            hunks=hunks,
            notes=(f"{result.new_release} does not have it, nor a file that is half the same",),
            help=(f"leave the file out, or change what took its place{going(self.place.patch)}",),
        )

    def _gone(self, made_for: Version, hunk: Hunk, number: int) -> HunkConflict:
        """Return a hunk of a file that the new release does not have."""
        span = hunk_span(hunk)
        lost = look_for(self.place, made_for, None, hunk, Span(0, 0))
        elsewhere = lost.elsewhere if lost else None
        release = release_of(self.place.git, self.place.new_base)
        return HunkConflict(
            number,
            _header(hunk),
            "conflict",
            span.start + 1,
            tuple(map(shown, hunk.lines)),
            Excerpt(span.start + 1, span.of(made_for.lines)),
            None,
            (),
            self._commits(made_for.path, span, wanted=True),
            elsewhere,
            (),
            (suggest(self.place.patch, hunk, lost, made_for.path, release),) if elsewhere else (),
            _text(surrounding(made_for, hunk)),
        )

    def _examine_added(self, file: FileDiff) -> FileConflict:
        place = self.place
        found = Version(place.git, place.new_before, file.path)
        if found.kind is None:
            blocked = self._blocking_parent(file.path)
            result = self._result(file, "appeared" if blocked else "added", None, conflicting=bool(blocked))
            note = f"{result.new_release} has a file {blocked}, where the patch needs a folder"
            return replace(result, notes=(note,)) if blocked else result
        result = self._result(file, "appeared", file.path, conflicting=True)
        if found.kind != "blob":
            return replace(result, notes=(f"{result.new_release} has a folder of this name",))
        ours = Version(place.git, place.old_after, file.path)
        if ours.blob == found.blob:
            same = f"{result.new_release} has the very same file"
            return replace(result, notes=(same,), help=(f"leave the file out{going(place.patch)}",))
        return self._appeared(result, file, FileVersions(ours, found, None, None))

    def _blocking_parent(self, path: str) -> str | None:
        parents = (path[: match.start()] for match in re.finditer("/", path))
        return next((parent for parent in parents if self._version(self.place.new_before, parent)), None)

    def _appeared(self, result: FileConflict, file: FileDiff, versions: FileVersions) -> FileConflict:
        ours, theirs, lines = versions.made_for, versions.found, versions.forward
        whole = Span(0, lines.old_length)
        differing = sum(len(edit.old) for edit in lines.edits)
        note = f"{len(whole) - differing} of the {len(whole)} lines of our file are in upstream's"
        hunk = HunkConflict(
            1,
            _header(file.hunks[0]) if file.hunks else "",
            "conflict",
            1,
            tuple(f"+{line}" for line in ours.lines),
            None,
            Excerpt(1, theirs.lines, _changed(lines.inverse(), Span(0, lines.new_length))),
            unified(ours.lines, theirs.lines, lines, whole),
        )
        advice = f"make one file of the two, or leave ours out{going(self.place.patch)}"
        return replace(result, hunks=(hunk,), notes=(note,), help=(advice,))

    def _hunks(self, file: FileDiff, versions: FileVersions) -> tuple[HunkConflict, ...]:
        outcomes = self._outcomes(versions, file.hunks)
        return tuple(
            self._hunk(versions, hunk, number, outcome)
            for number, (hunk, outcome) in enumerate(zip(file.hunks, outcomes, strict=True), 1)
        )

    def _hunk(self, versions: FileVersions, hunk: Hunk, number: int, outcome: HunkOutcome) -> HunkConflict:
        span = hunk_span(hunk)
        image = versions.image(span)
        result = HunkConflict(
            number,
            _header(hunk),
            outcome,
            image.start + 1,
            tuple(map(shown, hunk.lines)),
            Excerpt(span.start + 1, span.of(versions.made_for.lines), _changed(versions.forward, span)),
            _excerpt_now(versions, image),
            _upstream_change(versions, span),
            within=_text(surrounding(versions.made_for, hunk)),
        )
        wanted = result.outcome == "conflict" or (self.all_commits and bool(result.upstream_change))
        commits = self._commits(versions.made_for.path, _in_release(versions, span), wanted=wanted)
        result = replace(result, commits=commits)
        return self._explained(result, versions, hunk, image) if result.outcome == "conflict" else result

    def _outcomes(self, versions: FileVersions, hunks: Sequence[Hunk]) -> tuple[HunkOutcome, ...]:
        """Return what became of each hunk; where the whole file merged, that takes no merge of its own."""
        paths = {versions.made_for.path, versions.found.path}
        listed = any(stages.path in paths for stages in self.attempt.conflicts)
        every = listed or self.attempt.outcome is Outcome.ABSORBED
        # Merging may take a deleted file for one that the patch moved, and list it under the other name.
        tried = [hunk for hunk in hunks if every or not hunk.new_count]
        outcomes = iter(versions.try_hunks(tried))
        return tuple(
            next(outcomes) if every or not hunk.new_count else _placed(versions, hunk) for hunk in hunks
        )

    def _explained(
        self, result: HunkConflict, versions: FileVersions, hunk: Hunk, image: Span
    ) -> HunkConflict:
        """Add to a hunk in conflict what can be said in words."""
        place, span, found = self.place, hunk_span(hunk), versions.found
        release = release_of(place.git, place.new_base)
        lost = look_for(place, versions.made_for, found, hunk, image)
        return replace(
            result,
            new_upstream=_excerpt_now(versions, image, alone=lost is not None),
            elsewhere=lost.elsewhere if lost else None,
            notes=(
                *describe_origin(place, versions, span),
                *describe_change(versions, span, image, release),
                *describe_loss(lost, found.path, release),
                *describe_presence(hunk, found, image),
            ),
            help=(suggest(place.patch, hunk, lost, f"{found.path}:{image.start + 1}", release),),
        )

    def _commits(self, path: str, span: Span | None, *, wanted: bool) -> tuple[UpstreamCommit, ...]:
        if self.history is None or span is None or not wanted:
            return ()
        return self.history.touching(path, range(span.start + 1, span.stop + 1))


def _placed(versions: FileVersions, hunk: Hunk) -> HunkOutcome:
    """Say what became of a hunk of a file that merged."""
    return "absorbed" if versions.has(hunk) else "applies"


def _header(hunk: Hunk) -> str:
    return f"@@ -{hunk.old_start},{hunk.old_count} +{hunk.new_start},{hunk.new_count} @@"


def _changed(lines: LineMap, span: Span) -> tuple[int, ...]:
    """Return the numbers, from 1, of the lines of ``span`` that the other version does not have."""
    gone = (range(edit.old.start, edit.old.stop) for edit in lines.touching(span))
    return tuple(line + 1 for part in gone for line in part if span.start <= line < span.stop)


def _text(definition: Definition | None) -> str | None:
    return str(definition) if definition else None


def _excerpt_now(versions: FileVersions, image: Span, *, alone: bool = False) -> Excerpt:
    """Return the lines that a hunk meets; where there are none, or they stand ``alone``, those around too."""
    lines = versions.found.lines
    if alone or not image:
        image = Span(max(0, image.start - _AROUND), min(len(lines), image.stop + _AROUND))
    return Excerpt(image.start + 1, image.of(lines), _changed(versions.forward.inverse(), image))


def _in_release(versions: FileVersions, span: Span) -> Span | None:
    """Return the lines of the bare old release that ``span`` of the patched one stands for."""
    return versions.back.image(span) if versions.back else None


def _upstream_change(versions: FileVersions, span: Span) -> tuple[str, ...]:
    region = _in_release(versions, span)
    if region is None or versions.old is None or versions.new is None or versions.upstream is None:
        return ()
    return unified(versions.old.lines, versions.new.lines, versions.upstream, region)

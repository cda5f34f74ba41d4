"""What upstream did, between two releases, to the places that a patch touches and to what it imports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vllm_stack.applying import Outcome, commit_patch
from vllm_stack.carrying import carry
from vllm_stack.conflicts import explain_conflict, release_of
from vllm_stack.fileversions import Version, lines_between
from vllm_stack.importing import Sources, imports_of
from vllm_stack.linemap import Span, unified
from vllm_stack.moved import renames
from vllm_stack.replay import own_commits, places_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.conflicts import FileConflict
    from vllm_stack.git import Git
    from vllm_stack.gitsource import History, UpstreamCommit
    from vllm_stack.importing import Definition, Import
    from vllm_stack.linemap import LineMap
    from vllm_stack.patch import Patch
    from vllm_stack.replay import PatchPlace
    from vllm_stack.stack import Stack

Change = Literal["unchanged", "changed", "gone"]


@dataclass(frozen=True)
class ImportedName:
    """Something that a patch imports from a module of upstream."""

    name: str
    """Empty when the patch imports the module itself."""
    change: Change
    """Of its definition."""
    line: int
    """Where the old release defines it, from 1."""
    upstream_change: tuple[str, ...]
    """Unified diff of the definition."""
    commits: tuple[UpstreamCommit, ...] = ()


@dataclass(frozen=True)
class ImportedModule:
    """A file of upstream that a patch's files import something of."""

    path: str
    new_path: str | None
    """None when the new release has no such file, nor one that git takes for the same."""
    added: int
    removed: int
    """Lines, in the whole file."""
    names: tuple[ImportedName, ...]


@dataclass(frozen=True)
class Explanation:
    """One patch between its own release and another."""

    patch: str
    subject: str
    old_release: str
    new_release: str
    outcome: Outcome
    """What applying it on the new release, after the patches before it, gives."""
    messages: tuple[str, ...]
    files: tuple[FileConflict, ...]
    imports: tuple[ImportedModule, ...]


def explain_patch(
    git: Git, stack: Stack, patch: Patch, bases: tuple[str, str], history: History | None = None
) -> Explanation:
    """Say what upstream did to the places of ``patch`` between the commits ``bases`` of two bare releases.

    ``git`` is a workbench that has both. ConflictError when the stack does not apply to its own release.
    """
    place, outcome, messages = _carry_up_to(git, stack, patch, bases)
    # What cannot be read cannot be compared either.
    readable = outcome is not Outcome.MALFORMED
    return Explanation(
        patch.name,
        patch.subject,
        release_of(git, bases[0]),
        release_of(git, bases[1]),
        outcome,
        messages,
        explain_conflict(place, history, all_commits=True) if readable else (),
        _Importing(place, history).modules() if readable else (),
    )


def _carry_up_to(
    git: Git, stack: Stack, patch: Patch, bases: tuple[str, str]
) -> tuple[PatchPlace, Outcome, tuple[str, ...]]:
    """Carry the patches up to ``patch`` over, and return its place and what became of it."""
    head = bases[1]
    for place in places_of(git, stack, own_commits(git, stack, bases[0]), *bases):
        attempt = carry(git, place.patch, place.old_before, place.old_after, head)
        if place.patch.name == patch.name:
            return replace(place, new_before=head), attempt.outcome, attempt.messages
        if attempt.tree and attempt.outcome.applied:
            head = commit_patch(git, head, attempt.tree, place.patch)
    raise ValueError(f"{patch.name} is not in the stack")


class _Importing:
    """Finds out about what the files of a patch import."""

    def __init__(self, place: PatchPlace, history: History | None) -> None:
        self._place = place
        self._history = history
        self._old = Sources(place.git, place.old_base)
        self._new = Sources(place.git, place.new_base)

    def modules(self) -> tuple[ImportedModule, ...]:
        """Return the modules of the old release that the patch adds imports of, sorted by path."""
        found: dict[str, dict[str, Definition]] = {}
        for item in self._added_imports():
            definition = self._old.locate(item)
            if definition:
                found.setdefault(definition.path, {})[item.name or ""] = definition
        return tuple(self._module(path, names) for path, names in sorted(found.items()))

    def _added_imports(self) -> Iterator[Import]:
        place = self._place
        for file in place.patch.files:
            if not file.path.endswith(".py") or file.status == "D":
                continue
            before = Version(place.git, place.old_before, file.path)
            after = Version(place.git, place.old_after, file.path)
            known = imports_of(before.data, file.path) if file.status == "M" else ()
            yield from (item for item in imports_of(after.data, file.path) if item not in known)

    def _module(self, path: str, names: dict[str, Definition]) -> ImportedModule:
        git, place = self._place.git, self._place
        old = Version(git, place.old_base, path)
        new_path: str | None = path
        if path not in self._new.paths:
            rename = renames(git, place.old_base, place.new_base).get(path)
            new_path = rename.path if rename else None
        if new_path is None:
            gone = tuple(ImportedName(name, "gone", at.span.start + 1, ()) for name, at in names.items())
            return ImportedModule(path, None, 0, len(old.raw_lines), gone)
        new = Version(git, place.new_base, new_path)
        lines = lines_between(old, new)
        return ImportedModule(
            path,
            new_path,
            sum(len(edit.new) for edit in lines.edits),
            sum(len(edit.old) for edit in lines.edits),
            tuple(self._name(name, at.span, (old, new), lines) for name, at in sorted(names.items())),
        )

    def _name(self, name: str, span: Span, sides: tuple[Version, Version], lines: LineMap) -> ImportedName:
        old, new = sides
        if not span or not lines.touching(span):
            return ImportedName(name, "unchanged", span.start + 1, ())
        change: Change = "changed" if self._new.defines(new.path, name) else "gone"
        difference = unified(old.lines, new.lines, lines, span)
        return ImportedName(name, change, span.start + 1, difference, self._commits(old.path, span))

    def _commits(self, path: str, span: Span) -> tuple[UpstreamCommit, ...]:
        if self._history is None:
            return ()
        return self._history.touching(path, range(span.start + 1, span.stop + 1))

"""Stacks against releases: what would become of each patch on each, without changing anything.

What is found depends on the stacks and the releases alone, so that a matrix that is kept in a repository can
be compared with what a later run gives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_stack.errors import UsageError
from vllm_stack.layoutcheck import LAYOUT_NOTES, check_layout
from vllm_stack.listing import UnknownReleaseError
from vllm_stack.pins import PinnedFile
from vllm_stack.rebase import Orders, Rebase
from vllm_stack.releases import Candidate, find_candidate
from vllm_stack.replay import Verdict
from vllm_stack.report import SCHEMA, to_plain
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vllm_stack.base import Base
    from vllm_stack.pins import Pin
    from vllm_stack.replay import ReplayedPatch
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class MatrixContract:
    """Something that a patch relies on and a release does not have."""

    contract: str
    origin: str
    path: str
    line: int | None
    found: str


@dataclass(frozen=True)
class MatrixConflict:
    """A file of a patch that does not apply to a release."""

    path: str
    new_path: str | None
    """Where the release has it; None when nowhere."""
    status: str


@dataclass(frozen=True)
class MatrixCell:
    """One patch on one release."""

    patch: str
    verdict: Verdict
    outcome: str
    """How it applied: a clean patch strictly or at an offset."""
    resolutions: tuple[str, ...]
    """Ids of the recorded resolutions that were used."""
    conflicts: tuple[MatrixConflict, ...]
    contracts: tuple[MatrixContract, ...]

    @classmethod
    def of(cls, patch: ReplayedPatch) -> MatrixCell:
        """Return what the matrix says of a replayed patch."""
        return cls(
            patch.name,
            patch.verdict,
            str(patch.outcome),
            patch.used,
            tuple(
                MatrixConflict(file.path, file.new_path, str(file.status))
                for file in patch.conflicts
                if file.conflicting
            ),
            tuple(
                MatrixContract(broken.contract, str(broken.origin), broken.path, broken.line, broken.found)
                for broken in patch.contracts
            ),
        )


@dataclass(frozen=True)
class MatrixSdist:
    """A release's source archive, by which a later run verifies the same sources."""

    filename: str
    sha256: str
    size: int


@dataclass(frozen=True)
class MatrixRelease:
    """All patches of a stack on one release."""

    release: str
    source: str
    """What its files were taken from: ``index``, ``folder`` or ``git``."""
    sdist: MatrixSdist | None
    """None for a folder or a commit."""
    base: str
    """Commit of the base that they gave."""
    clean: bool
    """Whether all patches are."""
    notes: tuple[str, ...]
    patches: tuple[MatrixCell, ...]


@dataclass(frozen=True)
class MatrixTarget:
    """One stack on all releases."""

    target: str
    pinned: str
    """The release that it is written for."""
    stack_id: str
    releases: tuple[MatrixRelease, ...]


def matrix_of(
    workspace: Workspace, targets: Sequence[str], wanted: Sequence[str], *, offline: bool
) -> tuple[MatrixTarget, ...]:
    """Try the stacks on what ``wanted`` names: versions, ``latest``, paths, revisions, or TARGET=such a name.

    What is named without a target counts for each one that has such a release. UsageError when none has.
    """
    found: dict[str, list[Candidate]] = {target: [] for target in targets}
    for name in wanted:
        for target, candidate in _candidates(workspace, targets, name, offline=offline):
            if candidate.release not in [known.release for known in found[target]]:
                found[target].append(candidate)
    return tuple(_row(workspace, target, candidates) for target, candidates in found.items() if candidates)


def _candidates(
    workspace: Workspace, targets: Sequence[str], name: str, *, offline: bool
) -> Iterator[tuple[str, Candidate]]:
    target, separator, release = name.partition("=")
    if separator and target in workspace.targets():
        if target not in targets:
            raise UsageError(f"{name} is for another target than --target names")
        yield target, find_candidate(workspace, target, release, offline=offline)
        return
    unknown = []
    for target in targets:
        try:
            yield target, find_candidate(workspace, target, name, offline=offline)
        except UnknownReleaseError as error:
            unknown.append(error)
    if len(unknown) == len(targets):
        raise unknown[0]


def _row(workspace: Workspace, target: str, candidates: Sequence[Candidate]) -> MatrixTarget:
    stack = Stack.load(workspace, target)
    releases = tuple(_tried(workspace, target, candidate) for candidate in candidates)
    return MatrixTarget(target, stack.pin.release, stack.stack_id, releases)


def _tried(workspace: Workspace, target: str, candidate: Candidate) -> MatrixRelease:
    outcome = Rebase(workspace, target).dry_run(candidate, Orders())
    replayed = outcome.replay.patches if outcome.replay else ()
    cells = tuple(MatrixCell.of(patch) for patch in replayed)
    return MatrixRelease(
        release=candidate.release,
        source=candidate.source,
        sdist=MatrixSdist(**dict(candidate.pin.sdist)) if candidate.source == "index" else None,
        base=candidate.base.commit,
        clean=all(cell.verdict is Verdict.CLEAN for cell in cells),
        notes=candidate.notes,
        patches=cells,
    )


# -- a matrix that is kept


class _Part(BaseModel):
    """Of the file, what a later run needs."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _KeptRelease(_Part):
    release: str
    sdist: PinnedFile
    notes: tuple[str, ...]


class _KeptTarget(_Part):
    target: str
    releases: tuple[_KeptRelease, ...]


class _Kept(_Part):
    kept_schema: int = Field(alias="schema")
    command: Literal["matrix"]
    targets: tuple[_KeptTarget, ...]


@dataclass(frozen=True)
class KeptMatrix:
    """The JSON of an earlier run."""

    path: Path
    document: Mapping[str, Any]
    kept: _Kept

    @classmethod
    def load(cls, path: Path) -> KeptMatrix:
        """Read the file. UsageError when it is absent or no matrix."""
        try:
            data = path.read_bytes()
            kept = _Kept.model_validate_json(data)
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no file {path}", hint="`matrix VERSION… --json PATH` makes it"
            ) from error
        except ValidationError as error:
            raise UsageError(f"{path} is not the JSON of a matrix of releases") from error
        if kept.kept_schema != SCHEMA:
            raise UsageError(f"{path} has schema {kept.kept_schema}, this is schema {SCHEMA}")
        return cls(path, json.loads(data), kept)

    def again(
        self, workspace: Workspace, targets: Sequence[str], *, offline: bool
    ) -> tuple[MatrixTarget, ...]:
        """Try today's stacks on the same sources, which the file has the hashes of."""
        rows = []
        for kept in self.kept.targets:
            if kept.target in targets:
                candidates = [
                    _kept_candidate(workspace, kept.target, one, offline=offline) for one in kept.releases
                ]
                rows.append(_row(workspace, kept.target, candidates))
        return tuple(rows)

    def differences(self, targets: Sequence[MatrixTarget]) -> tuple[str, ...]:
        """Return what differs in ``targets`` from the file, one line each."""
        names = {row.target for row in targets}
        kept = [row for row in self.document["targets"] if row["target"] in names]
        before, after = dict(_flat(kept, "")), dict(_flat(to_plain(targets), ""))
        return tuple(
            f"{key}: {_shown(before, key)} in the file, {_shown(after, key)} now"
            for key in dict.fromkeys((*before, *after))
            if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        )


_ABSENT = object()
#: The keys by which an entry of a list is called.
_NAMES = ("target", "release", "patch", "contract", "path")


def _flat(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield every plain value with its place: names, where entries of lists have them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{place} {key}".strip())
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            named = [item[key] for key in _NAMES if key in item] if isinstance(item, dict) else []
            yield from _flat(item, f"{place} {named[0] if named else number}".strip())
    else:
        yield place, value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _kept_candidate(workspace: Workspace, target: str, kept: _KeptRelease, *, offline: bool) -> Candidate:
    present = Stack.load(workspace, target).pin
    pin = present.model_copy(update={"release": kept.release, "sdist": kept.sdist})
    before = base_of(workspace, present, offline=offline)
    base = base_of(workspace, pin, offline=offline)
    return Candidate(
        kept.release,
        pin,
        "",
        base,
        "index",
        notes=tuple(_notes_again(present, pin, before, base, kept.notes)),
        lacks=("it was made from a kept matrix",),
    )


def _notes_again(present: Pin, pin: Pin, before: Base, base: Base, kept: Sequence[str]) -> Iterator[str]:
    """Yield what is noted of a release: of its layout anew, of where its files came from as it is kept."""
    yield from (note for note in kept if not note.startswith(LAYOUT_NOTES))
    if pin.release != present.release:
        yield from check_layout(pin.layout, before, base)

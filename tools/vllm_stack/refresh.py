"""Refreshing: from the commits of a checkout to patch files, without losing any."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_stack.applying import Outcome, try_stack
from vllm_stack.atomic import write_atomic
from vllm_stack.errors import LintError, UsageError, WorkInProgressError
from vllm_stack.export import export_commit
from vllm_stack.hashing import sha256_bytes
from vllm_stack.lint import lint_stack
from vllm_stack.patch import Patch
from vllm_stack.series import FILE_NAME, Series, SeriesEntry, parse_series, with_patches
from vllm_stack.stack import SERIES_FILE, Stack
from vllm_stack.tomlfile import read_toml_text

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_stack.applying import AppliedStack
    from vllm_stack.checkout import Checkout

_SLUG_LENGTH = 40
_UNSQUASHED = ("fixup! ", "squash! ", "amend! ")


class FileAction(StrEnum):
    """What a refresh does with a patch file."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    ADDED = "added"
    DROPPED = "dropped"


@dataclass(frozen=True)
class PlannedFile:
    """One patch file of the stack to be."""

    name: str
    action: FileAction
    commit: str | None
    data: bytes | None


@dataclass(frozen=True)
class RefreshPlan:
    """All that a refresh would do; nothing is written until it is carried out."""

    stack: Stack
    files: tuple[PlannedFile, ...]
    series_text: str

    @cached_property
    def result(self) -> Stack:
        """The stack that carrying the plan out gives."""
        patches = tuple(Patch(file.name, file.data) for file in self.files if file.data is not None)
        series = parse_series(self.series_text, source=SERIES_FILE)
        return replace(self.stack, series=series, patches=patches)

    @property
    def changes_anything(self) -> bool:
        """Whether any file differs from what is there."""
        return self.result.stack_id != self.stack.stack_id


def plan_refresh(stack: Stack, checkout: Checkout, drop: tuple[str, ...], test: str) -> RefreshPlan:
    """Work out the patch files that the checkout's commits give.

    ``drop`` names the patches that may go; ``test`` is the test command of new ones. Raises
    WorkInProgressError when a patch would vanish, work is not committed, or the patch files are newer
    than the checkout; LintError when a commit does not make a proper patch.
    """
    checkout.require_no_operation()
    if checkout.state.pending is not None:
        raise WorkInProgressError(
            f"an `apply` to {checkout.folder} was interrupted", hint="run `apply` again to finish it"
        )
    checkout.require_clean()
    commits = _require_linear(checkout)
    exports = _require_round_trip(checkout, commits)
    names = _assign_names(stack, checkout, exports)
    _require_nothing_vanishes(stack, set(names.values()), drop)
    files = [_planned(stack, commit, names[commit], data) for commit, data in exports.items()]
    dropped = [PlannedFile(name, FileAction.DROPPED, None, None) for name in drop]
    series = read_toml_text(stack.directory / SERIES_FILE)
    text = with_patches(series, _entries(stack.series, files, test), drop)
    plan = RefreshPlan(stack, (*files, *dropped), text)
    _require_known_files(plan, checkout)
    _require_lint(plan)
    return plan


def _require_linear(checkout: Checkout) -> list[str]:
    git, base = checkout.git, checkout.state.base
    if git.run("merge-base", "--is-ancestor", base, "HEAD", check=False).returncode:
        raise WorkInProgressError(f"HEAD of {checkout.folder} does not descend from the base {base}")
    commits = checkout.commits()
    if not commits:
        raise WorkInProgressError(
            f"{checkout.folder} holds no commit on top of the base: refreshing would empty the stack",
            hint="`apply` puts the stack's commits there",
        )
    merges = git.run("rev-list", "--merges", f"{base}..HEAD").lines
    if merges:
        raise WorkInProgressError("the checkout holds merge commits", details=merges, hint="rebase them away")
    empty = [commit for commit in commits if git.tree(commit) == git.tree(f"{commit}^")]
    if empty:
        raise WorkInProgressError(
            "these commits change nothing; their patches would vanish",
            details=[_line(checkout, commit) for commit in empty],
            hint="take the commit out and name its patch with --drop, or give it its change back",
        )
    return commits


def _line(checkout: Checkout, commit: str) -> str:
    return checkout.git.run("log", "-1", "--format=%h %s", commit).text


def _subject(checkout: Checkout, commit: str) -> str:
    return checkout.git.run("log", "-1", "--format=%s", commit).text


def _require_round_trip(checkout: Checkout, commits: list[str]) -> dict[str, bytes]:
    """Return each commit as a patch file, having seen that applying and exporting it again gives the same.

    What mail cannot carry (a line such as ``---`` in a message, two spaces in a subject) would be lost.
    """
    exports = {commit: export_commit(checkout.git, commit) for commit in commits}
    patches = [Patch(commit, data) for commit, data in exports.items()]
    for patch, result in zip(patches, try_stack(checkout.git, checkout.state.base, patches), strict=True):
        again = export_commit(checkout.git, result.commit) if result.commit else None
        if result.outcome is not Outcome.STRICT or again != patch.data:
            raise LintError(
                f"{_line(checkout, patch.name)} does not survive as a patch file",
                details=result.messages,
                hint="take lines like `---`, `diff -`, `Index: `, `From: ` and doubled spaces out of the "
                "message; a very long author name that is not ASCII is lost as well",
            )
    return exports


def _assign_names(stack: Stack, checkout: Checkout, exports: dict[str, bytes]) -> dict[str, str]:
    """Find each commit's file: by its subject, then by its note; a new one gets a new name."""
    noted = checkout.names()
    known = {patch.name for patch in stack.patches}
    by_subject = {patch.subject: patch.name for patch in stack.patches}
    names: dict[str, str] = {}
    for commit in exports:
        subject = _subject(checkout, commit)
        if subject.startswith(_UNSQUASHED):
            raise WorkInProgressError(
                f"not squashed yet: {subject}", hint="git rebase -i --autosquash refs/stack/base"
            )
        name = by_subject.get(subject) or noted.get(commit)
        if name in known and name not in names.values():
            names[commit] = str(name)
    for commit, data in exports.items():
        if commit not in names:
            names[commit] = _new_name(stack, Patch(commit, data), set(names.values()) | known)
    return names


def _new_name(stack: Stack, patch: Patch, taken: set[str]) -> str:
    topic = stack.series.topic(patch.topic or "")
    if topic is None:
        known = ", ".join(topic.name for topic in stack.series.topics)
        raise LintError(
            f"commit {patch.name[:12]} ({patch.subject}) has no `Topic:` trailer of a topic of the series",
            hint=f"topics of {stack.target}: {known}; a new one is written into {SERIES_FILE} first",
        )
    first, last = topic.numbers
    numbers = [int(match["number"]) for match in map(FILE_NAME.match, taken) if match]
    used = [number for number in numbers if first <= number <= last]
    number = max([*used, topic.last or 0, first - 1]) + 1
    if number > last:
        raise LintError(f"topic {topic.name} has no number left in {first}-{last}")
    name = f"{number:04d}-{topic.name}-{_slug(patch.subject)}.patch"
    if (stack.directory / name).exists() and (stack.directory / name).read_bytes() != patch.data:
        raise LintError(
            f"{name} lies in the folder and is not in the series", hint="move it away, or list it"
        )
    return name


def _slug(subject: str) -> str:
    text = re.sub(r"^(\[[^][]+\])+|'", "", subject).lower()
    words = re.sub(r"[^a-z0-9]+", "-", text).strip("-")
    if len(words) > _SLUG_LENGTH:
        words = words[: _SLUG_LENGTH + 1].rpartition("-")[0] or words[:_SLUG_LENGTH]
    return words or "patch"


def _require_nothing_vanishes(stack: Stack, kept: set[str], drop: tuple[str, ...]) -> None:
    known = {patch.name for patch in stack.patches}
    for name in drop:
        # A file that is there and not listed was dropped by a refresh that was interrupted.
        if name not in known and not (FILE_NAME.match(name) and (stack.directory / name).exists()):
            raise UsageError(f"--drop {name}: the stack has no such patch")
        if name in kept:
            raise UsageError(f"--drop {name}: the checkout still has its commit")
    vanished = [patch.name for patch in stack.patches if patch.name not in kept and patch.name not in drop]
    if vanished:
        raise WorkInProgressError(
            "these patches have no commit in the checkout and would vanish",
            details=vanished,
            hint="name each with --drop if that is meant; if they came with a newer series, `apply` first",
        )


def _require_known_files(plan: RefreshPlan, checkout: Checkout) -> None:
    """Refuse to replace a patch file that is neither what the checkout was made from nor what it gives."""
    before = checkout.state.files
    planned = {file.name: file.data for file in plan.files}
    on_disk = {patch.name: patch.sha256 for patch in plan.stack.patches}
    changed = []
    for name in sorted(before.keys() | on_disk.keys()):
        data = planned.get(name)
        after = None if data is None else sha256_bytes(data)
        if on_disk.get(name) not in (before.get(name), after):
            changed.append(name)
    if changed:
        raise WorkInProgressError(
            "these patch files changed after the checkout was made; refreshing would undo that",
            details=changed,
            hint="`apply` takes them over (`apply --force` keeps the checkout's work under refs/stack/saved)",
        )


def _planned(stack: Stack, commit: str, name: str, data: bytes) -> PlannedFile:
    old = next((patch for patch in stack.patches if patch.name == name), None)
    if old is None:
        return PlannedFile(name, FileAction.ADDED, commit, data)
    if old.same_but_for_date(data):
        return PlannedFile(name, FileAction.UNCHANGED, commit, old.data)
    return PlannedFile(name, FileAction.CHANGED, commit, data)


def _entries(series: Series, files: list[PlannedFile], test: str) -> list[SeriesEntry]:
    old = {entry.file: entry for entry in series.patches}
    return [old.get(file.name) or _new_entry(file, test) for file in files]


def _new_entry(file: PlannedFile, test: str) -> SeriesEntry:
    topic = Patch(file.name, file.data or b"").topic
    return SeriesEntry(file=file.name, topic=topic or "", test=test)


def _require_lint(plan: RefreshPlan) -> None:
    findings = [finding for finding in lint_stack(plan.result, on_disk=False) if finding.is_error]
    if findings:
        raise LintError(
            "the commits do not make proper patches; nothing was written",
            details=[str(finding) for finding in findings],
            hint="amend the commits and refresh again",
        )


def carry_out(plan: RefreshPlan, checkout: Checkout) -> None:
    """Write the planned files, then the series, then remove dropped files, and record the checkout.

    Each file appears whole. After an interruption the same command finishes the work.
    """
    directory = plan.stack.directory
    for file in plan.files:
        if file.data is not None and file.action is not FileAction.UNCHANGED:
            write_atomic(directory / file.name, file.data)
    if plan.changes_anything:
        write_atomic(directory / SERIES_FILE, plan.series_text.encode())
    for file in plan.files:
        if file.action is FileAction.DROPPED:
            remove_file(directory / file.name)
    names = {file.commit: file.name for file in plan.files if file.commit}
    checkout.record(checkout.head, plan.result, names)


def remove_file(path: Path) -> None:
    """Remove a dropped patch's file, if it is still there."""
    path.unlink(missing_ok=True)


def differing_exports(stack: Stack, applied: AppliedStack) -> tuple[str, ...]:
    """Return the names of the patches that are not, byte for byte, what re-exporting them gives."""
    return tuple(
        patch.name
        for patch, result in zip(stack.patches, applied.patches, strict=True)
        if result.commit is None or export_commit(applied.git, result.commit) != patch.data
    )

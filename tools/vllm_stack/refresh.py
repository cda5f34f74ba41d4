"""Refreshing: from the commits of a checkout to patch files, without losing any."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.applying import take_apart
from vllm_stack.atomic import write_atomic
from vllm_stack.errors import LintError, UsageError, WorkInProgressError
from vllm_stack.export import export_commit
from vllm_stack.lint import lint_stack
from vllm_stack.patch import Patch
from vllm_stack.series import FILE_NAME, Series, SeriesEntry, parse_series, read_series_text, with_patches
from vllm_stack.stack import SERIES_FILE, Stack

if TYPE_CHECKING:
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

    @property
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
    WorkInProgressError when a patch would vanish or work is not committed, LintError when a commit
    does not make a proper patch.
    """
    checkout.require_no_operation()
    checkout.require_clean()
    commits = _require_linear(checkout)
    for commit in commits:
        _require_whole_message(checkout, commit)
    names = _assign_names(stack, checkout, commits)
    _require_nothing_vanishes(stack, set(names.values()), drop)
    files = [_planned(stack, checkout, commit, names[commit]) for commit in commits]
    dropped = [PlannedFile(name, FileAction.DROPPED, None, None) for name in drop]
    text = with_patches(read_series_text(stack.directory / SERIES_FILE), _entries(stack.series, files, test))
    plan = RefreshPlan(stack, (*files, *dropped), text)
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


def _assign_names(stack: Stack, checkout: Checkout, commits: list[str]) -> dict[str, str]:
    """Find each commit's file: by its note, then by its subject; a new one gets a new name."""
    noted = checkout.names()
    known = {patch.name for patch in stack.patches}
    by_subject = {patch.subject: patch.name for patch in stack.patches}
    names: dict[str, str] = {}
    for commit in commits:
        subject = _subject(checkout, commit)
        if subject.startswith(_UNSQUASHED):
            raise WorkInProgressError(
                f"not squashed yet: {subject}", hint="git rebase -i --autosquash refs/stack/base"
            )
        name = by_subject.get(subject) or noted.get(commit)
        if name in known and name not in names.values():
            names[commit] = str(name)
    for commit in commits:
        if commit not in names:
            names[commit] = _new_name(stack, checkout, commit, set(names.values()) | known)
    return names


def _new_name(stack: Stack, checkout: Checkout, commit: str, taken: set[str]) -> str:
    patch = Patch("new.patch", export_commit(checkout.git, commit))
    topic = stack.series.topic(patch.topic or "")
    if topic is None:
        known = ", ".join(topic.name for topic in stack.series.topics)
        raise LintError(
            f"commit {_line(checkout, commit)} has no `Topic:` trailer that names a topic of the series",
            hint=f"topics of {stack.target}: {known}; a new one is written into {SERIES_FILE} first",
        )
    first, last = topic.numbers
    numbers = [int(match["number"]) for match in map(FILE_NAME.match, taken) if match]
    number = max([used for used in numbers if first <= used <= last], default=first - 1) + 1
    if number > last:
        raise LintError(f"topic {topic.name} has no number left in {first}-{last}")
    return f"{number:04d}-{topic.name}-{_slug(patch.subject)}.patch"


def _slug(subject: str) -> str:
    text = re.sub(r"^(\[[^][]+\])+|'", "", subject).lower()
    words = re.sub(r"[^a-z0-9]+", "-", text).strip("-")
    if len(words) > _SLUG_LENGTH:
        words = words[: _SLUG_LENGTH + 1].rpartition("-")[0] or words[:_SLUG_LENGTH]
    return words


def _require_nothing_vanishes(stack: Stack, kept: set[str], drop: tuple[str, ...]) -> None:
    known = {patch.name for patch in stack.patches}
    for name in drop:
        if name not in known:
            raise UsageError(f"--drop {name}: the stack has no such patch")
        if name in kept:
            raise UsageError(f"--drop {name}: the checkout still has its commit")
    vanished = [patch.name for patch in stack.patches if patch.name not in kept and patch.name not in drop]
    if vanished:
        raise WorkInProgressError(
            "these patches have no commit in the checkout and would vanish",
            details=vanished,
            hint="name each with --drop if that is meant",
        )


def _planned(stack: Stack, checkout: Checkout, commit: str, name: str) -> PlannedFile:
    old = next((patch for patch in stack.patches if patch.name == name), None)
    data = export_commit(checkout.git, commit)
    if old is None:
        return PlannedFile(name, FileAction.ADDED, commit, data)
    if old.same_but_for_date(data):
        return PlannedFile(name, FileAction.UNCHANGED, commit, old.data)
    return PlannedFile(name, FileAction.CHANGED, commit, data)


def _require_whole_message(checkout: Checkout, commit: str) -> None:
    """A line such as ``---`` ends the message for git; what follows it would be lost on the way back."""
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
        kept = take_apart(checkout.git, export_commit(checkout.git, commit), Path(folder)).message
    written = checkout.git.run("log", "-1", "--format=%B", commit).stdout
    if kept.split() != written.split():
        raise LintError(
            f"the message of {_line(checkout, commit)} does not survive as a patch file",
            hint="take lines like `---`, `diff -`, `Index: ` or `From: ` out of it",
        )


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
            (directory / file.name).unlink(missing_ok=True)
    names = {file.commit: file.name for file in plan.files if file.commit}
    checkout.record(checkout.head, plan.result.stack_id, names)


def differing_exports(stack: Stack, applied: AppliedStack) -> tuple[str, ...]:
    """Return the names of the patches that are not, byte for byte, what re-exporting them gives."""
    return tuple(
        patch.name
        for patch, result in zip(stack.patches, applied.patches, strict=True)
        if result.commit is None or export_commit(applied.git, result.commit) != patch.data
    )

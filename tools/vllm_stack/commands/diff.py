"""``vllm-stack diff``: what lies between two versions of the stacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.comparing import Comparison, compare_stacks
from vllm_stack.conflictview import View, diff_rows
from vllm_stack.errors import UsageError
from vllm_stack.options import offline_option, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stackversions import StackVersion, stack_versions
from vllm_stack.workbench import open_workbench

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.comparing import ComparedPatch
    from vllm_stack.workspace import Workspace

_STYLES = {"added": "green", "removed": "red", "changed": "yellow", "renamed": "yellow"}
#: Lines of a patch's difference that are shown; the JSON report has all.
_MOST_LINES = 200


@dataclass(frozen=True)
class VersionNamed:
    """One side of the comparison."""

    wanted: str
    commit: str | None
    """Of this project; None for what is on disk."""
    release: str
    version: str
    stack_id: str

    @classmethod
    def of(cls, version: StackVersion) -> VersionNamed:
        """Return what names a version."""
        stack = version.stack
        return cls(version.wanted, version.commit, stack.pin.release, version.version, stack.stack_id)


@dataclass(frozen=True)
class TargetDiff:
    """One target; without ``old`` it is new, without ``new`` it is gone."""

    target: str
    old: VersionNamed | None
    new: VersionNamed | None
    comparison: Comparison | None
    """None for a target that only one version has."""


@dataclass(frozen=True)
class DiffReport(Report):
    """All targets."""

    command: ClassVar[str] = "diff"
    targets: tuple[TargetDiff, ...]

    def render(self, console: Console) -> None:
        """Print what differs, target by target."""
        view = View(console)
        for item in self.targets:
            _render_target(view, item)


def _render_target(view: View, item: TargetDiff) -> None:
    names = [side.version if side else "nothing" for side in (item.old, item.new)]
    view.heading(item.target, " -> ".join(names), "bold")
    if item.comparison is None:
        return
    if item.old and item.new and item.old.stack_id == item.new.stack_id:
        view.line("  the same stack")
    for kind, settings in (("pin", item.comparison.pin), ("series", item.comparison.series)):
        for setting in settings:
            view.line(f"  {kind}: {setting.key}: {setting.old or '(none)'} -> {setting.new or '(none)'}")
    if item.comparison.reordered:
        view.line("  the order of the patches changed")
    for patch in item.comparison.patches:
        _render_patch(view, patch)


def _render_patch(view: View, patch: ComparedPatch) -> None:
    was = f" (was {patch.old_name})" if patch.old_name not in (patch.name, None) else ""
    text = f"{patch.name}{was}: {patch.subject}"
    view.heading(f"  {patch.action}", text, _STYLES.get(patch.action, "dim"))
    if patch.interdiff:
        view.section("how it changed (a diff of the two patches):", diff_rows(patch.interdiff), _MOST_LINES)


@click.argument("old")
@click.argument("new", default=".")
@target_option
@offline_option
def diff(workspace: Workspace, old: str, new: str, targets: tuple[str, ...], *, offline: bool) -> DiffReport:
    """Compare two versions of the stacks: patches added, removed and changed, pins and series.

    OLD and NEW are git revisions of this project, releases such as 0.33.0+bw.1, or `.` for what is on disk
    (the default of NEW). Both stacks are applied to their own releases, so that a patch that only moved is
    told from one that changed.

    Example: tools/vllm-stack diff 0.33.0+bw.1 .
    """
    before, after = (stack_versions(workspace, wanted, targets) for wanted in (old, new))
    # A release is of one target, and says nothing about the others.
    names = sorted(before.keys() | after.keys())
    if "+" in old or "+" in new:
        names = [name for name in names if name in before and name in after]
    unknown = [name for name in targets if name not in names]
    if unknown or not names:
        raise UsageError(f"{old} and {new} have no stack of {', '.join(unknown) or 'the same target'}")
    return DiffReport(
        tuple(_compare(workspace, name, before.get(name), after.get(name), offline=offline) for name in names)
    )


def _compare(
    workspace: Workspace, target: str, old: StackVersion | None, new: StackVersion | None, *, offline: bool
) -> TargetDiff:
    before, after = (VersionNamed.of(version) if version else None for version in (old, new))
    if old is None or new is None:
        return TargetDiff(target, before, after, None)
    bases = [base_of(workspace, version.stack.pin, offline=offline) for version in (old, new)]
    with open_workbench(*bases) as git:
        comparison = compare_stacks(git, (old.stack, bases[0].commit), (new.stack, bases[1].commit))
    return TargetDiff(target, before, after, comparison)


command = stack_command("diff")(diff)

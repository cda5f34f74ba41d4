"""``vllm-stack explain``: what upstream did to the places that a patch touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import click

from vllm_stack.explaining import Explanation, explain_patch
from vllm_stack.explainview import render_explanation
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.releases import Source, find_candidate, history_to
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack, choose_patch
from vllm_stack.workbench import open_workbench

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class ExplainReport(Report):
    """One patch between its pin and another release."""

    command: ClassVar[str] = "explain"
    target: str
    explanation: Explanation

    def render(self, console: Console) -> None:
        """Print it place by place."""
        render_explanation(console, self.explanation)


@click.argument("patch")
@target_option
@click.option(
    "--to",
    default="latest",
    show_default=True,
    metavar="RELEASE",
    help="Version, `latest`, path of an sdist or of an unpacked one, or (with --source git) a git revision.",
)
@click.option(
    "--source",
    type=click.Choice(["auto", "sdist", "git"]),
    default="auto",
    show_default=True,
    help="Where upstream's files come from; `git` also names the commits and pull requests.",
)
@offline_option
def explain(
    workspace: Workspace, targets: tuple[str, ...], *, patch: str, to: str, source: str, offline: bool
) -> ExplainReport:
    """Show what upstream did, since the pinned release, to the places that PATCH touches.

    PATCH is a file name, the beginning of one, or a number. Hunks that conflict are shown from both sides;
    of what the patch newly imports, the definitions that changed. Nothing is changed.

    Example: tools/vllm-stack explain 0203 --to 0.34.0 --source git
    """
    stacks = [Stack.load(workspace, name) for name in selected_targets(workspace, targets)]
    stack, chosen = choose_patch(stacks, patch)
    candidate = find_candidate(workspace, stack.target, to, source=cast("Source", source), offline=offline)
    history = history_to(workspace, stack.pin, candidate, offline=offline)
    old = base_of(workspace, stack.pin, offline=offline)
    with open_workbench(old, candidate.base) as git:
        bases = (old.commit, candidate.base.commit)
        return ExplainReport(stack.target, explain_patch(git, stack, chosen, bases, history))


command = stack_command("explain")(explain)

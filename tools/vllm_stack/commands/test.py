"""``vllm-stack test``: the test of each patch, in the tree after it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.applying import apply_stack
from vllm_stack.bisecting import Bench, Bisection
from vllm_stack.commands.build_wheel import default_arch
from vllm_stack.conflictview import printable
from vllm_stack.errors import StackError, TrialError, UsageError
from vllm_stack.fetch import Fetcher
from vllm_stack.installed import default_python
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.report import Report
from vllm_stack.sources import base_of
from vllm_stack.stack import Stack, choose_patch
from vllm_stack.testtree import official_files
from vllm_stack.trial import Runner, Trial
from vllm_stack.workbench import open_workbench

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.base import Base
    from vllm_stack.workspace import Workspace

#: Lines of a failed test's output that are shown when nobody watched it.
_SHOWN_LINES = 40
_STYLES = {"passed": "green", "failed": "bold red", "timed-out": "bold red"}


@dataclass(frozen=True)
class TargetTrials:
    """What was run for one target."""

    target: str
    release: str
    stack_id: str
    trials: tuple[Trial, ...]
    bisections: tuple[Bisection, ...]


@dataclass(frozen=True)
class TrialReport(Report):
    """What was run for all targets."""

    command: ClassVar[str] = "test"
    python: str
    watched: bool
    """Whether output was shown while it came."""
    targets: tuple[TargetTrials, ...]

    def failure(self) -> StackError | None:
        """A test that fails is one, wherever it does."""
        failed = [
            f"{trial.patch}: {trial.outcome}: {trial.command}"
            for target in self.targets
            for trial in target.trials
            if not trial.passed
        ]
        broken = [
            _sentence(item)
            for target in self.targets
            for item in target.bisections
            if item.verdict != "passes"
        ]
        if not failed and not broken:
            return None
        hint = "`--bisect` names the patch that breaks a test" if failed else None
        count = len(failed) + len(broken)
        said = "1 test fails" if count == 1 else f"{count} tests fail"
        return TrialError(said, details=[*failed, *broken], hint=hint)

    def render(self, console: Console) -> None:
        """Print one line per test, and the end of what it said: the last line of those that passed."""
        for target in self.targets:
            console.print(f"{target.target} {target.release}", style="bold", markup=False)
            for trial in target.trials:
                _render_trial(console, trial, watched=self.watched)
            for bisection in target.bisections:
                for trial in bisection.trials:
                    _render_trial(console, trial, watched=self.watched)
                console.print(f"  {_sentence(bisection)}", style="bold", markup=False)
                for tree in bisection.untestable:
                    console.print(f"    could not be tested: the tree after {tree}", markup=False)


def _render_trial(console: Console, trial: Trial, *, watched: bool) -> None:
    where = "" if trial.tree == trial.patch else f" after {trial.tree}"
    status = "" if trial.status in (0, None) else f" (exit status {trial.status})"
    text = f"  {trial.outcome} {trial.patch}{where}{status}, {trial.seconds:.1f} s: {trial.command}"
    console.print(text, style=_STYLES[trial.outcome], markup=False)
    if not watched:
        # The last line of one that passed says how many tests were skipped or left out, which is no failure.
        count = 1 if trial.passed else _SHOWN_LINES
        for line in trial.output.rstrip().splitlines()[-count:]:
            console.print(f"    | {printable(line)}", markup=False)


def _sentence(bisection: Bisection) -> str:
    """Say in one sentence what a bisection found."""
    patch = bisection.patch
    if bisection.verdict == "passes":
        return f"the test of {patch} passes at the end of the stack"
    if bisection.verdict == "fails-alone":
        return f"the test of {patch} fails without any other patch: it breaks itself, or needs another Python"
    if bisection.verdict == "undecided":
        return f"the test of {patch} fails in every tree that the patch applies to"
    culprits = " or ".join(bisection.culprits)
    after = "an earlier patch" if bisection.before else "a later patch"
    return f"the test of {patch} is broken by {after}: {culprits}"


@target_option
@click.option("--patch", "patches", multiple=True, metavar="PATCH", help="Patch to test. Default: all.")
@click.option(
    "--bisect",
    is_flag=True,
    help="Run the tests at the end of the stack; name the patch that breaks one that fails.",
)
@click.option(
    "--python", default=None, metavar="PATH", help="What `python` means to a test. Default: that of the PATH."
)
@click.option(
    "--native",
    type=click.Choice(["auto", "wheel", "none"]),
    default="auto",
    show_default=True,
    help="Link what the official wheel has beyond the sources into the trees; auto: if there is anything.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=1800, show_default=True, help="Seconds per test."
)
@offline_option
def test(
    workspace: Workspace,
    targets: tuple[str, ...],
    *,
    patches: tuple[str, ...],
    bisect: bool,
    python: str | None,
    native: str,
    timeout: float,
    offline: bool,
) -> TrialReport:
    """Run each patch's own test command in a fresh tree with the stack up to that patch.

    The trees are scratch copies; the checkout is left alone. With --bisect each test runs at the end of the
    stack instead; one that fails there is tried on fewer patches until the one that breaks it is known.
    PATCH is a file name, the beginning of one, or a number.

    Example: tools/vllm-stack test --patch 0203 --python ~/vllm-env/bin/python
    """
    watched = sys.stderr.isatty()
    watcher = sys.stderr.buffer if watched else None
    runner = Runner(_program(python), timeout, watcher)
    options = _Options(workspace, runner, native, bisect, offline)
    chosen = _chosen(workspace, targets, patches)
    return TrialReport(
        runner.python, watched, tuple(options.run(stack, names) for stack, names in chosen if names)
    )


def _program(python: str | None) -> str:
    """Return the interpreter's path. UsageError when it is none."""
    wanted = python or default_python()
    found = shutil.which(str(Path(wanted).expanduser()))
    if found is None:
        raise UsageError(f"there is no program {wanted}", hint="name the interpreter with --python")
    return str(Path(found).absolute())


def _chosen(
    workspace: Workspace, targets: tuple[str, ...], patches: tuple[str, ...]
) -> list[tuple[Stack, list[str]]]:
    """Return the stacks with the names of the patches to test, in order."""
    stacks = [Stack.load(workspace, name) for name in selected_targets(workspace, targets)]
    wanted = [choose_patch(stacks, name) for name in patches]
    return [
        (
            stack,
            [
                patch.name
                for patch in stack.patches
                if not patches or any(other is stack and item is patch for other, item in wanted)
            ],
        )
        for stack in stacks
    ]


@dataclass(frozen=True)
class _Options:
    """How the tests of a stack are run."""

    workspace: Workspace
    runner: Runner
    native: str
    bisect: bool
    offline: bool

    def run(self, stack: Stack, names: list[str]) -> TargetTrials:
        base = base_of(self.workspace, stack.pin, offline=self.offline)
        applied = apply_stack(base, stack)
        fetcher = Fetcher(self.workspace.downloads, offline=self.offline)
        official = self._official(stack, base, fetcher)
        with open_workbench(base) as git:
            bench = Bench(git, stack, applied, self.runner, official, fetcher.progress.note)
            trials = () if self.bisect else tuple(bench.run_own(name) for name in names)
            bisections = tuple(bench.bisect(name) for name in names) if self.bisect else ()
        return TargetTrials(stack.target, stack.pin.release, stack.stack_id, trials, bisections)

    def _official(self, stack: Stack, base: Base, fetcher: Fetcher) -> Path | None:
        compiled = stack.pin.layout.native or stack.pin.layout.generated
        if self.native == "none" or (self.native == "auto" and not compiled):
            return None
        return official_files(self.workspace, stack.pin, base, default_arch(), fetcher)


command = stack_command("test")(test)

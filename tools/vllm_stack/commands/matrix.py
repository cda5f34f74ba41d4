"""``matrix``: the stacks against several releases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.errors import LintError, StackError, UsageError
from vllm_stack.matrix import KeptMatrix, MatrixCell, MatrixRelease, MatrixTarget, matrix_of
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.replay import Verdict
from vllm_stack.report import Report

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.workspace import Workspace

_STYLES = {Verdict.CLEAN: "green", Verdict.THREE_WAY: "green", Verdict.ABSORBED: "yellow"}


@dataclass(frozen=True)
class MatrixReport(Report):
    """What would become of each patch on each release."""

    command: ClassVar[str] = "matrix"
    targets: tuple[MatrixTarget, ...]

    def render(self, console: Console) -> None:
        """Print a table for each target, and below it what keeps patches from being good."""
        for row in self.targets:
            _render_table(console, row)
            for release in row.releases:
                _render_trouble(console, release)


@dataclass(frozen=True)
class CheckedMatrixReport(MatrixReport):
    """The same, compared with a file that was kept."""

    kept: str
    differences: tuple[str, ...]

    def failure(self) -> StackError | None:
        """A difference is one."""
        if not self.differences:
            return None
        return LintError(
            f"the matrix is no longer that of {self.kept}",
            details=self.differences,
            hint="if it has to be so: `matrix VERSION… --json` writes the file anew",
        )

    def render(self, console: Console) -> None:
        """Print the matrix and whether it is that of the file."""
        super().render(console)
        if not self.differences:
            console.print(f"as in {self.kept}", markup=False)


def _render_table(console: Console, row: MatrixTarget) -> None:
    """Print one line for each patch; lines are never cut, as a table of rich's would be in a log."""
    from rich.text import Text  # noqa: PLC0415 - slow to import, and only needed here

    title = f"{row.target}: {len(row.releases[0].patches)} patches, written for {row.pinned}"
    console.print(title, style="bold", markup=False)
    columns = [[release.release, *map(_word, release.patches)] for release in row.releases]
    names = ["", *(cell.patch.removesuffix(".patch") for cell in row.releases[0].patches)]
    widths = [max(map(len, column)) for column in columns]
    for number, name in enumerate(names):
        line = Text(f"  {name:{max(map(len, names))}}")
        for column, width, release in zip(columns, widths, row.releases, strict=True):
            style = _style(release.patches[number - 1]) if number else "bold"
            line.append("  ").append(f"{column[number]:{width}}", style)
        line.rstrip()
        console.print(line)


def _word(cell: MatrixCell) -> str:
    return f"{cell.verdict} (recorded)" if cell.resolutions else str(cell.verdict)


def _style(cell: MatrixCell) -> str:
    return _STYLES.get(cell.verdict, "bold red")


def _render_trouble(console: Console, release: MatrixRelease) -> None:
    for cell in release.patches:
        if cell.conflicts or cell.contracts:
            console.print(f"{release.release}, {cell.patch}: {cell.verdict}", style="bold", markup=False)
        for file in cell.conflicts:
            moved = f", now {file.new_path}" if file.new_path not in (None, file.path) else ""
            console.print(f"  {file.path}{moved}: does not merge ({file.status})", markup=False)
        for broken in cell.contracts:
            place = f"{broken.path}:{broken.line}" if broken.line else broken.path
            console.print(f"  {place}: {broken.contract}", markup=False)
            console.print(f"    {broken.found}", markup=False)


@click.argument("wanted", nargs=-1, metavar="[[TARGET=]VERSION|latest|PATH|GITREF]...")
@target_option
@offline_option
@click.option(
    "--check",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Try the stacks on the releases of an earlier run's JSON, and fail when anything differs.",
)
def matrix(
    workspace: Workspace,
    wanted: tuple[str, ...],
    targets: tuple[str, ...],
    *,
    offline: bool,
    check: Path | None,
) -> MatrixReport:
    """Say what would become of each patch on other releases. Changes nothing.

    A release that is named without a target counts for each target that has it.

    Example: tools/vllm-stack matrix 0.31.0 0.32.0 0.33.0 --json ci/matrix.json
    """
    names = selected_targets(workspace, targets)
    if bool(wanted) == (check is not None):
        raise UsageError("name releases, or an earlier run's JSON with --check", hint="matrix --help")
    if check is None:
        return MatrixReport(matrix_of(workspace, names, wanted, offline=offline))
    kept = KeptMatrix.load(check)
    rows = kept.again(workspace, names, offline=offline)
    return CheckedMatrixReport(rows, str(check), kept.differences(rows))


command = stack_command("matrix")(matrix)

"""``vllm-stack verify``: is this wheel, or this installation, the patched one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.errors import StackError, UsageError, VerificationError
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.report import Report

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.verify import Verification
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class VerifyReport(Report):
    """What was verified, and what was found."""

    command: ClassVar[str] = "verify"
    verified: tuple[Verification, ...]
    python: str | None
    """The interpreter whose installations were inspected."""
    notes: tuple[str, ...]

    def failure(self) -> StackError | None:
        """Return an error when there is any finding."""
        count = sum(len(item.findings) for item in self.verified)
        if not count:
            return None
        return VerificationError(f"{count} finding{'s' if count > 1 else ''}")

    def render(self, console: Console) -> None:
        """Print one line per finding, each with its code."""
        if self.python:
            console.print(f"python: {self.python}", markup=False)
        for item in self.verified:
            console.print(
                f"{item.subject}: {item.distribution} {item.version}: {_verdict(item)}", markup=False
            )
            for finding in item.findings:
                console.print(f"  {finding.code}: {finding.subject}: {finding.message}", markup=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False)


def _verdict(item: Verification) -> str:
    kind = f"patched with stack {(item.stack_id or '')[:12]}" if item.patched else "not patched"
    return f"{kind}, {len(item.findings)} findings" if item.findings else f"{kind}, as it should be"


@click.argument("wheels", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--installed", is_flag=True, help="Inspect an installation instead of wheels.")
@click.option(
    "--python",
    default=None,
    metavar="PATH",
    help="Interpreter whose installation is inspected. Default: the first python3 on the PATH that is not "
    "this tool's own, which is that of an activated environment.",
)
@target_option
@offline_option
def verify(
    workspace: Workspace,
    wheels: tuple[Path, ...],
    targets: tuple[str, ...],
    python: str | None,
    *,
    installed: bool,
    offline: bool,
) -> VerifyReport:
    """Check files against RECORD, every statement of the version, tags, SBOM and the current stack.

    Ends with exit code 8 when anything is found, and when a wheel or an installation is the official one
    without the stack. Nothing is imported or changed.

    Example: tools/vllm-stack verify dist/vllm-0.33.0+bw.1-cp38-abi3-manylinux_2_28_x86_64.whl

    Example: tools/vllm-stack verify --installed --python ~/venv/bin/python
    """
    from vllm_stack import verifying  # noqa: PLC0415 - slow to import, and no part of --help

    if installed == bool(wheels):
        raise UsageError("name wheels, or use --installed", hint="vllm-stack verify --help shows both")
    if python and not installed:
        raise UsageError("--python goes with --installed")
    stacks = verifying.Stacks(workspace, offline=offline)
    if installed:
        names = selected_targets(workspace, targets)
        interpreter, verified = verifying.verify_installed(stacks, names, python, explicit=bool(targets))
        return VerifyReport(verified, interpreter, stacks.notes)
    return VerifyReport(tuple(verifying.verify_wheel(stacks, path) for path in wheels), None, stacks.notes)


command = stack_command("verify")(verify)

"""The options that the commands share, and the frame that each command runs in."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_stack.errors import EXIT_CODES_HELP, StackError, UsageError
from vllm_stack.git import require_git
from vllm_stack.report import Report, write_json
from vllm_stack.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

target_option = click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Target to work on; may be given several times. Default: all.",
)
one_target_option = click.option("--target", default=None, metavar="NAME", help="Target to work on.")
offline_option = click.option(
    "--offline", is_flag=True, envvar="VLLM_STACK_OFFLINE", help="Use the download cache alone."
)
_workspace_options = (
    click.option(
        "--root",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        help="Stack repository to work on. Default: the one this tool lies in.",
    ),
    click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        help="Cache folder. Default: $VLLM_STACK_CACHE, else vllm-stack in the XDG cache folder.",
    ),
)
_json_option = click.option(
    "--json",
    "json_target",
    default=None,
    metavar="PATH|-",
    help="Also write the report as JSON; - is stdout.",
)


def stack_command(name: str) -> Callable[[Callable[..., Report]], click.Command]:
    """Turn a function that returns a Report into a command.

    The function gets the workspace as its first argument. The frame adds ``--json``, ``--root`` and
    ``--cache-dir``, prints the report, writes it (or the error) as JSON, and raises what the report
    says the command ends with.
    """

    def decorate(function: Callable[..., Report]) -> click.Command:
        @functools.wraps(function)
        def framed(
            *, json_target: str | None, root: Path | None, cache_dir: Path | None, **options: Any
        ) -> None:
            report: Report | None = None
            error: StackError | None
            try:
                require_git()
                report = function(Workspace.locate(root, cache_dir), **options)
                error = report.failure()
            except StackError as raised:
                error = raised
            except OSError as raised:
                error = _system_error(raised)
            if report is not None:
                report.render(console_for(json_target))
            if json_target is not None:
                unwritten = _write(json_target, name, error, report)
                error = error or unwritten
            if error is not None:
                raise error

        command: Callable[..., None] = framed
        for option in (*_workspace_options, _json_option):
            command = option(command)
        return click.command(name, epilog=EXIT_CODES_HELP)(command)

    return decorate


def _system_error(raised: OSError) -> StackError:
    """Turn what the system refused (no space, no permission, a folder for a file) into a clear error."""
    error = UsageError(
        f"the system refused: {raised.strerror or raised}",
        details=[str(name) for name in (raised.filename, raised.filename2) if name is not None],
        hint="make room, or give access, and run the same command again",
    )
    error.__cause__ = raised
    return error


def _write(json_target: str, name: str, error: StackError | None, report: Report | None) -> StackError | None:
    """Write the JSON report; what keeps it from being written never hides the command's own error."""
    try:
        write_json(json_target, name, error, report)
    except OSError as failure:
        problem = UsageError(f"cannot write the report: {failure}")
        if error is not None:
            click.echo(f"warning: {problem.message}", err=True)
        return problem
    return None


def console_for(json_target: str | None) -> Any:
    """Return the console for people: stderr when stdout carries JSON."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, and no part of --help

    return Console(file=sys.stderr if json_target == "-" else sys.stdout, soft_wrap=True, highlight=False)


def selected_targets(workspace: Workspace, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets that were named, or all of them. UsageError for an unknown one."""
    known = workspace.targets()
    for name in names:
        if name not in known:
            raise UsageError(f"there is no target {name}", hint=f"targets: {', '.join(known)}")
    return tuple(dict.fromkeys(names)) or known


def require_one_target(names: tuple[str, ...], option: str) -> None:
    """Raise UsageError when ``option``, which is about the patches of one target, meets several."""
    if len(names) > 1:
        raise UsageError(f"{option} needs one --target", hint=f"--target {' or --target '.join(names)}")

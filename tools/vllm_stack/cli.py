"""The command line: a group that loads each sub-command's module only when it is used."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from vllm_stack import __version__
from vllm_stack.errors import EXIT_CODES_HELP, StackError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

#: Name -> (module, one line of help): the group's help needs no command's imports.
COMMANDS: dict[str, tuple[str, str]] = {
    "build-wheel": ("build_wheel", "Build the patched wheels of the pinned releases."),
    "verify": ("verify", "Say whether a wheel or an installation is the patched one."),
    "apply": ("apply", "Make a checkout with one commit per patch."),
    "refresh": ("refresh", "Write the commits of a checkout back as patches."),
    "lint": ("lint", "Check the stacks against their rules."),
    "test": ("test", "Run the test of each patch in the tree after it."),
    "status": ("status", "Show targets, pins, stacks and checkouts."),
    "rebase-upstream": ("rebase_upstream", "Move a stack to another release of upstream."),
    "matrix": ("matrix", "Say what would become of the patches on several releases."),
    "explain": ("explain", "Show what upstream did to the places that a patch touches."),
    "diff": ("diff", "Compare two versions of the stacks."),
    "fetch": ("fetch", "Download and verify the pinned files."),
    "release": ("release", "Give the current stack its release number."),
}


class LazyGroup(click.Group):
    """A group whose sub-commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the order in which a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a sub-command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"vllm_stack.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the sub-commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)
@click.version_option(__version__, prog_name="vllm-stack")
def cli() -> None:
    """Build vLLM with a maintained stack of patches out of pinned, verified sources.

    Example: tools/vllm-stack build-wheel --target vllm
    """


def show_error(error: StackError) -> None:
    """Print an error for a person: what, which, and what to do next."""
    click.secho("error: ", nl=False, err=True, fg="red", bold=True)
    click.echo(error.message, err=True)
    for line in error.details:
        click.echo(f"  {line}", err=True)
    if error.hint:
        click.secho("hint: ", nl=False, err=True, fg="cyan")
        click.echo(error.hint, err=True)


#: What a shell reports of a program that SIGTERM ended.
_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def _clean_termination() -> Iterator[None]:
    """Let SIGTERM end the block like an exception, so that temporary files are removed."""

    def terminate(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not stop the removal
        sys.exit(_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented code."""
    try:
        with _clean_termination():
            cli.main(args=arguments, prog_name="vllm-stack", standalone_mode=False)
    except StackError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)

"""``fetch``: download and verify the pinned files."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.errors import UsageError
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.pins import ARCHITECTURES, Pin, PinnedFile, load_pin
from vllm_stack.report import Report

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from vllm_stack.fetch import Fetcher
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class FetchedFile:
    """A pinned file that is in the cache and was verified."""

    target: str
    filename: str
    path: Path
    sha256: str
    #: In bytes.
    size: int
    from_cache: bool
    #: Where it was downloaded from, without credentials; None when it came from the cache.
    source: str | None


@dataclass(frozen=True)
class FetchReport(Report):
    """The files that the selected targets are pinned to."""

    command: ClassVar[str] = "fetch"

    files: tuple[FetchedFile, ...]

    def render(self, console: Console) -> None:
        """Print one line per file."""
        for file in self.files:
            origin = "cached" if file.from_cache else f"from {file.source}"
            console.print(f"{file.filename}  {file.size} bytes, {origin}", markup=False)
            console.print(f"  sha256 {file.sha256}", markup=False)
            console.print(f"  {file.path}", markup=False)


@stack_command("fetch")
@target_option
@click.option(
    "--arch",
    "arches",
    multiple=True,
    type=click.Choice(ARCHITECTURES),
    help="Architecture whose wheel is wanted; may be given several times. Default: this machine's.",
)
@click.option("--all-arches", is_flag=True, help="Fetch the wheels of all architectures.")
@offline_option
def command(
    workspace: Workspace,
    targets: tuple[str, ...],
    arches: tuple[str, ...],
    *,
    all_arches: bool,
    offline: bool,
) -> FetchReport:
    """Download the pinned sdist and wheel of each target, and verify what is in the cache.

    The package sources are those of your pip configuration. Every file is checked against the sha256 and
    size of its pin; one that differs is not kept.

    Example: tools/vllm-stack fetch --target vllm --all-arches
    """
    from vllm_stack.fetch import Fetcher  # noqa: PLC0415 - slow to import, and no part of --help

    fetcher = Fetcher(workspace.downloads, offline=offline)
    chosen = _architectures(arches, all_arches=all_arches)
    pins = {target: load_pin(workspace.pin_file(target)) for target in selected_targets(workspace, targets)}
    wanted = [(target, pin, file) for target, pin in pins.items() for file in _files(pin, chosen)]
    return FetchReport(files=tuple(_fetched(fetcher, *item) for item in wanted))


def _architectures(arches: tuple[str, ...], *, all_arches: bool) -> tuple[str, ...] | None:
    """Return the architectures that were asked for; None for all that the pin has."""
    if all_arches:
        if arches:
            raise UsageError("--arch and --all-arches exclude each other")
        return None
    if arches:
        return tuple(dict.fromkeys(arches))
    if platform.machine() not in ARCHITECTURES:
        raise UsageError(
            f"there are no wheels for this machine's architecture {platform.machine()}",
            hint=f"name one with --arch: {', '.join(ARCHITECTURES)}",
        )
    return (platform.machine(),)


def _files(pin: Pin, arches: tuple[str, ...] | None) -> list[PinnedFile]:
    wheels = pin.wheels if arches is None else [pin.wheel(arch) for arch in arches]
    return [pin.sdist, *wheels]


def _fetched(fetcher: Fetcher, target: str, pin: Pin, file: PinnedFile) -> FetchedFile:
    fetched = fetcher.obtain(pin.distribution, file)
    return FetchedFile(
        target=target,
        filename=file.filename,
        path=fetched.path,
        sha256=file.sha256,
        size=file.size,
        from_cache=fetched.from_cache,
        source=fetched.source,
    )

"""``vllm-stack build-wheel``: the patched wheels of the pinned releases."""

from __future__ import annotations

import json
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from vllm_stack.errors import UsageError
from vllm_stack.options import offline_option, selected_targets, stack_command, target_option
from vllm_stack.pins import ARCHITECTURES
from vllm_stack.report import Report

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.build import WheelReport
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class BuildReport(Report):
    """The wheels that were built."""

    command: ClassVar[str] = "build-wheel"
    folder: Path
    wheels: tuple[WheelReport, ...]
    install: InstallAdvice

    def render(self, console: Console) -> None:
        """Print each wheel, then how to install them."""
        for wheel in self.wheels:
            wheel.render(console)
        self.install.render(console)


@dataclass(frozen=True)
class InstallAdvice:
    """Commands that install the wheels, and what keeps them installed."""

    pip: str
    uv: str
    constraints: tuple[str, ...]
    """Lines for a constraints file."""
    uv_sources: tuple[str, ...]
    """Lines for pyproject.toml."""

    @classmethod
    def of(cls, folder: Path, wheels: tuple[WheelReport, ...], names: tuple[str, ...]) -> InstallAdvice:
        """Return the advice for wheels of the distributions ``names`` in ``folder``."""
        paths = [str(folder / wheel.output.filename) for wheel in wheels]
        pairs = list(zip(names, wheels, strict=True))
        return cls(
            pip=shlex.join(["python", "-m", "pip", "install", *paths]),
            uv=shlex.join(["uv", "pip", "install", "--torch-backend=auto", *paths]),
            constraints=tuple(f"{name}=={wheel.version}" for name, wheel in pairs),
            uv_sources=(
                "[tool.uv.sources]",
                # uv looks for a relative path beside the project's own pyproject.toml.
                *(
                    f"{name} = {{ path = {json.dumps(str(Path(path).absolute()), ensure_ascii=False)} }}"
                    for name, path in zip(names, paths, strict=True)
                ),
            ),
        )

    def render(self, console: Console) -> None:
        """Print the commands."""
        lines = (
            "",
            f"pip:  {self.pip}",
            f"uv:   {self.uv}",
            "",
            "A later install of the plain release replaces the patched one without a word. To keep it:",
            *(f"  {line}" for line in self.constraints),
            "in the file that PIP_CONSTRAINT and UV_CONSTRAINT name; in a uv project also",
            *(f"  {line}" for line in self.uv_sources),
            "pip takes the build of torch that its index has; which CUDA that one is for, or None, says",
            '  python -c "import torch; print(torch.version.cuda)"',
            "Another one comes from PyTorch's index for that CUDA: name it with --extra-index-url.",
            "Whether the patched wheels are there: tools/vllm-stack verify --installed",
        )
        for line in lines:
            console.print(line, markup=False)


def default_arch() -> str:
    """Return this machine's architecture. UsageError when upstream has no wheels for it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise UsageError(
            f"there are no wheels for this machine's architecture {machine}",
            hint=f"name one with --arch: {', '.join(ARCHITECTURES)}",
        )
    return machine


@target_option
@click.option(
    "--arch",
    type=click.Choice(ARCHITECTURES),
    default=None,
    help="Architecture of the wheels. Default: this machine's.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Folder for the wheels and their reports.",
)
@click.option("--label", default=None, metavar="TEXT", help="Own addition to the version, e.g. acme.2")
@offline_option
def build_wheel(
    workspace: Workspace,
    targets: tuple[str, ...],
    arch: str | None,
    output: Path,
    label: str | None,
    *,
    offline: bool,
) -> BuildReport:
    """Build the patched wheel of each target: the official wheel with the files that the stack changes.

    Everything is verified against the pins before it is read, and the wheel before it is reported. Beside
    each wheel lies <wheel>.json, which says what it was made of. Equal input gives equal bytes.

    Example: tools/vllm-stack build-wheel --target vllm
    """
    from vllm_stack import build  # noqa: PLC0415 - slow to import, and no part of --help
    from vllm_stack.fetch import Fetcher  # noqa: PLC0415
    from vllm_stack.pins import load_pin  # noqa: PLC0415

    options = build.BuildOptions(arch or default_arch(), output, label)
    fetcher = Fetcher(workspace.downloads, offline=offline)
    names = selected_targets(workspace, targets)
    distributions = tuple(load_pin(workspace.pin_file(name)).distribution for name in names)
    wheels = tuple(build.build_wheel(workspace, name, options, fetcher) for name in names)
    return BuildReport(output, wheels, InstallAdvice.of(output, wheels, distributions))


command = stack_command("build-wheel")(build_wheel)

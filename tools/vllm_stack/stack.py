"""A stack: the ordered patches of one target on its pin."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.errors import UsageError, WorkInProgressError
from vllm_stack.patch import Patch
from vllm_stack.pins import Pin, load_pin
from vllm_stack.series import Release, Series, parse_series
from vllm_stack.tomlfile import read_toml_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from vllm_stack.workspace import Workspace

SERIES_FILE = "series.toml"


def compute_stack_id(target: str, release: str, patches: Iterable[Patch]) -> str:
    """Return the sha256 over target, release, and each patch's name and bytes, in order.

    Every part is preceded by its length in bytes and a colon, so that no two lists of parts give the
    same input to the hash.
    """
    digest = hashlib.sha256()
    parts = [target.encode(), release.encode()]
    for patch in patches:
        parts += [patch.name.encode(), patch.data]
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Stack:
    """The pin, the series and the patches of one target."""

    target: str
    directory: Path
    pin: Pin
    series: Series
    patches: tuple[Patch, ...]

    @classmethod
    def load(cls, workspace: Workspace, target: str, *, within_rebase: bool = False) -> Stack:
        """Read a target's pin, series and patches. UsageError when one is absent or not valid.

        WorkInProgressError while a rebase that was interrupted has replaced some of them and not the others;
        ``within_rebase`` is for that rebase itself, which has replaced all.
        """
        if not within_rebase:
            _require_whole(workspace, target)
        directory = workspace.stack_directory(target)
        path = directory / SERIES_FILE
        series = parse_series(read_toml_text(path), source=str(path))
        patches = tuple(_read_patch(directory, entry.file) for entry in series.patches)
        return cls(target, directory, load_pin(workspace.pin_file(target)), series, patches)

    @property
    def stack_id(self) -> str:
        """64 hex digits that change with any byte of the stack."""
        return compute_stack_id(self.target, self.pin.release, self.patches)

    @property
    def releases(self) -> tuple[Release, ...]:
        """The stacks of this target that were given a number."""
        return self.series.releases


def _require_whole(workspace: Workspace, target: str) -> None:
    """Refuse a stack whose files are of two releases, because a rebase was interrupted among them."""
    try:
        phase = json.loads((workspace.rebase(target) / "state.json").read_bytes())["phase"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        return  # rebase-upstream itself reports this; an open rebase has changed no file of the stack
    if phase != "open":
        raise WorkInProgressError(
            f"a rebase of {target} was interrupted while it changed the stack",
            hint="`rebase-upstream --continue` finishes it, `--abort` takes it back",
        )


def choose_patch(stacks: Iterable[Stack], wanted: str) -> tuple[Stack, Patch]:
    """Return the one patch that ``wanted`` names: its file name, the beginning of that, or its number.

    UsageError when it is none or several.
    """
    name = wanted.rsplit("/", 1)[-1]
    every = [(stack, patch) for stack in stacks for patch in stack.patches]
    exact = [item for item in every if item[1].name in (name, f"{name}.patch")]
    found = exact or [item for item in every if name and item[1].name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = [f"{stack.target}: {patch.name}" for stack, patch in every]
        raise UsageError(f"no patch is called {wanted}", details=known, hint="a number is enough, e.g. 0100")
    raise UsageError(
        f"{wanted} can be {len(found)} patches",
        details=[f"{stack.target}: {patch.name}" for stack, patch in found],
        hint="give more of the name, or --target",
    )


def _read_patch(directory: Path, name: str) -> Patch:
    if "/" in name or name.startswith("."):
        raise UsageError(f"{directory / SERIES_FILE}: {name} is not a bare file name")
    if (directory / name).is_dir():
        raise UsageError(f"{directory / name} is a folder, not a patch")
    try:
        return Patch(name, (directory / name).read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"the series lists {name}, which is not in {directory}",
            hint="restore the file from git, or take the entry out with `refresh --drop`",
        ) from error

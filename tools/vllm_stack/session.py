"""An open rebase on disk: ``.vllm-stack/rebase-<target>/``, outside all that it will change.

``state.json`` says what was decided; it is written before anything is done about it, and all else can be
made anew from it. Replaying is quick and always gives the same, so that going on means replaying the stack
with one decision more. Nothing in ``patch-stack/`` or ``upstream/`` changes before the whole is accepted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_stack.atomic import sync_directory, write_atomic
from vllm_stack.base import Base
from vllm_stack.conflicttree import ConflictTree, Stop
from vllm_stack.errors import IntegrityError, WorkInProgressError
from vllm_stack.git import Git
from vllm_stack.pins import Pin, parse_pin
from vllm_stack.replay import Rulings
from vllm_stack.resolutions import FOLDER, Pair, Resolution, Resolutions
from vllm_stack.series import Series, parse_series
from vllm_stack.stack import SERIES_FILE
from vllm_stack.tomlfile import read_toml_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.releases import Candidate
    from vllm_stack.stack import Stack
    from vllm_stack.workspace import Workspace

_SCHEMA = 1


class Phase(StrEnum):
    """How far an open rebase is."""

    OPEN = "open"
    """Patches are being decided; nothing outside its folder has changed."""
    ACCEPTING = "accepting"
    """The journal is complete and its files are being put in place."""
    ABORTING = "aborting"
    """What accepting had changed is being put back."""


@dataclass(frozen=True)
class BasePlace:
    """Where a base lies."""

    folder: str
    commit: str

    @classmethod
    def of(cls, base: Base) -> BasePlace:
        """Return where ``base`` lies."""
        return cls(str(base.git.git_dir), base.commit)

    def open(self) -> Base | None:
        """Return the base, or None when it is not there any more."""
        base = Base(Git(Path(self.folder)), self.commit)
        return base if Path(self.folder).is_dir() and base.git.exists(f"{self.commit}^{{commit}}") else None


@dataclass(frozen=True)
class State:
    """What is in ``state.json``."""

    target: str
    wanted: str
    """The release as it was asked for."""
    old: str
    new: str
    stack_id: str
    old_base: BasePlace
    new_base: BasePlace
    files: dict[str, str]
    """sha256 of the pin and the series (paths below the root) when the rebase began."""
    phase: Phase = Phase.OPEN
    skipped: dict[str, str] = field(default_factory=dict)
    absorbed: dict[str, str] = field(default_factory=dict)
    contracts: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    stop: Stop | None = None
    prepared: bool = False
    """Whether the tree is where ``stop`` says."""
    notes: tuple[str, ...] = ()
    """What has to be known of the new release."""

    @property
    def rulings(self) -> Rulings:
        """What was decided about patches that are not good as they are."""
        return Rulings(self.skipped, self.absorbed, self.contracts, self.messages)

    @property
    def pair(self) -> Pair:
        """The two releases."""
        return Pair(self.old, self.new)

    def encode(self) -> bytes:
        """Return the bytes of ``state.json``."""
        return (json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=2) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> State:
        """Read the bytes of ``state.json``. ValueError, KeyError or TypeError when they are not that."""
        document: dict[str, Any] = json.loads(data)
        if document.pop("schema") != _SCHEMA:
            raise ValueError("written by another version of the tool")
        for key in ("old_base", "new_base"):
            document[key] = BasePlace(**document[key])
        if document["stop"] is not None:
            document["stop"] = Stop.decode(document["stop"])
        document["phase"] = Phase(document["phase"])
        document["notes"] = tuple(document["notes"])
        return cls(**document)


@dataclass(frozen=True)
class Session:
    """An open rebase."""

    folder: Path
    state: State

    @classmethod
    def find(cls, workspace: Workspace, target: str) -> Session | None:
        """Return the open rebase of a target, or None. IntegrityError when its state cannot be read."""
        folder = workspace.rebase(target)
        if not folder.is_dir():
            return None
        try:
            return cls(folder, State.decode((folder / "state.json").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"the state of the open rebase in {folder} cannot be read: {error}",
                hint="keep that folder and report this; if it has no folder `accept`, nothing else changed",
            ) from error

    @classmethod
    def create(
        cls, workspace: Workspace, stack: Stack, candidate: Candidate, state: State, series_text: str
    ) -> Session:
        """Write a new rebase, which appears whole."""
        folder = workspace.rebase(stack.target)
        folder.parent.mkdir(exist_ok=True)
        clear_leftovers(workspace, stack.target)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_atomic(part / "pin.toml", candidate.pin_text.encode())
            write_atomic(part / SERIES_FILE, series_text.encode())
            write_atomic(part / "state.json", state.encode())
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync_directory(folder.parent)
        return cls(folder, state)

    def record(self, **changes: Any) -> Session:
        """Write the state with some of it changed, and return the session that has it."""
        state = replace(self.state, **changes)
        write_atomic(self.folder / "state.json", state.encode())
        return replace(self, state=state)

    @property
    def tree(self) -> ConflictTree:
        """The tree in which a person resolves conflicts."""
        return ConflictTree(self.folder)

    @property
    def pin_text(self) -> str:
        """The pin to be."""
        return read_toml_text(self.folder / "pin.toml")

    @property
    def pin(self) -> Pin:
        """The pin to be, parsed."""
        return parse_pin(self.pin_text, source=str(self.folder / "pin.toml"))

    @property
    def series_text(self) -> str:
        """The series to be, before patches leave it; contracts may be edited in it meanwhile."""
        return read_toml_text(self.folder / SERIES_FILE)

    def series(self, stack: Stack) -> Series:
        """Return the series to be. WorkInProgressError when its patches are not the stack's."""
        path = self.folder / SERIES_FILE
        series = parse_series(self.series_text, source=str(path))
        if [entry.file for entry in series.patches] != [patch.name for patch in stack.patches]:
            raise WorkInProgressError(
                f"{path} lists other patches, or in another order, than the stack has",
                hint="only what stands inside their tables may be edited while a rebase is open",
            )
        return series

    def resolutions(self, stack: Stack) -> Resolutions:
        """Return what may resolve conflicts: this rebase's own, then what the project recorded."""
        return Resolutions(self.state.pair, (self.folder / FOLDER, stack.directory / FOLDER))

    def add_resolution(self, resolution: Resolution) -> None:
        """Keep a resolution within the rebase; the project gets it when the whole is accepted."""
        path = self.folder / FOLDER / resolution.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, resolution.encode())

    def remove(self) -> None:
        """End the rebase: it is gone at once, and its files a little later."""
        gone = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
        self.folder.rename(gone / "rebase")
        sync_directory(self.folder.parent)
        shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(workspace: Workspace, target: str) -> None:
    """Remove what interrupted commands left of rebases that had not begun or had ended."""
    folder = workspace.rebase(target)
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def only_one(workspace: Workspace, target: str) -> Iterator[None]:
    """Hold the lock of a target's rebase; WorkInProgressError when another process has it.

    The system gives the lock back when a process ends, however it ends.
    """
    folder = workspace.rebase(target)
    folder.parent.mkdir(exist_ok=True)
    descriptor = os.open(folder.parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise WorkInProgressError(f"another rebase-upstream of {target} is running") from error
    finally:
        os.close(descriptor)

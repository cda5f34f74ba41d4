"""Accepting a rebase: pin, series, patches and resolutions change together, or not at all.

The journal holds every file as it was and as it will be, before the first one is touched. Whatever
interrupts the work, it can be finished from the journal or taken back with it, byte for byte.
"""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_stack.atomic import sync_directory, write_atomic
from vllm_stack.checkoutmove import Snapshot
from vllm_stack.errors import IntegrityError, WorkInProgressError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FOLDER = "accept"
_SCHEMA = 1


@dataclass(frozen=True)
class FileChange:
    """A file of the project that accepting changes; None where it is not there."""

    path: str
    """Below the project's root."""
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)


@dataclass(frozen=True)
class CheckoutChange:
    """The checkout's move."""

    before: Snapshot
    head: str
    names: dict[str, str]
    """Patch file of each commit."""


@dataclass(frozen=True)
class Journal:
    """All that accepting changes."""

    files: tuple[FileChange, ...]
    folders: tuple[str, ...]
    """Folders that have to be made, outermost first."""
    checkout: CheckoutChange | None

    @classmethod
    def of(cls, root: Path, wanted: Mapping[str, bytes | None], checkout: CheckoutChange | None) -> Journal:
        """Return the journal of making the files below ``root`` as ``wanted``; None removes one."""
        files = tuple(FileChange(path, _read(root / path), data) for path, data in wanted.items())
        changed = tuple(file for file in files if file.before != file.after)
        folders: dict[str, None] = {}
        for file in changed:
            for parent in reversed((root / file.path).parents):
                if parent.is_relative_to(root) and not parent.exists():
                    folders[str(parent.relative_to(root))] = None
        return cls(changed, tuple(folders), checkout)

    def write(self, session: Path) -> None:
        """Write the journal below the folder of a rebase, flushed to disk, in place of an older one."""
        folder = session / _FOLDER
        part = session / f"{_FOLDER}.part"
        for left in (part, folder):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        listed = []
        for number, file in enumerate(self.files):
            names = {}
            for kind, data in (("before", file.before), ("after", file.after)):
                names[kind] = None if data is None else f"{number}.{kind}"
                if data is not None:
                    write_atomic(part / f"{number}.{kind}", data)
            listed.append({"path": file.path, **names})
        checkout = None if self.checkout is None else asdict(self.checkout)
        document = {"schema": _SCHEMA, "files": listed, "folders": self.folders, "checkout": checkout}
        write_atomic(part / "journal.json", (json.dumps(document, indent=2) + "\n").encode())
        part.rename(folder)
        sync_directory(session)

    @classmethod
    def read(cls, session: Path) -> Journal:
        """Read the journal of a rebase. IntegrityError when it cannot be read."""
        folder = session / _FOLDER
        try:
            document: dict[str, Any] = json.loads((folder / "journal.json").read_bytes())
            files = tuple(
                FileChange(entry["path"], *(_read(folder / name) if name else None for name in _names(entry)))
                for entry in document["files"]
            )
            return cls(files, tuple(document["folders"]), _checkout(document["checkout"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"the journal in {folder} cannot be read: {error}",
                hint="its *.before files are the project's files as they were",
            ) from error

    def carry_out(self, root: Path, session: Path) -> None:
        """Make every file what it will be. May be run again after an interruption.

        What is being written lies in ``session``, the rebase's folder, until it is complete.
        """
        self.require_known(root)
        for name in self.folders:
            (root / name).mkdir(exist_ok=True)
            sync_directory((root / name).parent)
        for file in self.files:
            _make(root / file.path, file.after, session / _FOLDER / "part")

    def undo(self, root: Path, session: Path) -> None:
        """Make every file what it was, in the same way."""
        self.require_known(root)
        for file in reversed(self.files):
            _make(root / file.path, file.before, session / _FOLDER / "part")
        for name in reversed(self.folders):
            if (root / name).is_dir() and not any((root / name).iterdir()):
                (root / name).rmdir()

    def require_known(self, root: Path) -> None:
        """Refuse when a file is neither what it was nor what it will be: somebody else changed it."""
        known = [(file.path, (file.before, file.after)) for file in self.files]
        strange = [path for path, either in known if _read(root / path) not in either]
        if strange:
            raise WorkInProgressError(
                "these files were changed by something else while the rebase was interrupted",
                details=strange,
                hint="save what is new in them, restore them from git, and run the same command again",
            )


def _names(entry: Mapping[str, Any]) -> tuple[str | None, str | None]:
    return entry["before"], entry["after"]


def _checkout(document: dict[str, Any] | None) -> CheckoutChange | None:
    if document is None:
        return None
    return CheckoutChange(Snapshot(**document["before"]), document["head"], document["names"])


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _make(path: Path, data: bytes | None, part: Path) -> None:
    """Make a file what it shall be; ``part`` is where it is until it is complete.

    Beside the file itself something would stay behind when the process is killed.
    """
    if _read(path) == data:
        return
    if data is None:
        path.unlink()
    else:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        write_atomic(part, data, mode=mode)
        try:
            part.replace(path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            write_atomic(path, data, mode=mode)
    sync_directory(path.parent)

"""Trees to run tests in: the files of a commit, with the official wheel's own files linked in."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.scratchindex import scratch_index
from vllm_stack.wheelzip import WheelArchive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.base import Base
    from vllm_stack.fetch import Fetcher
    from vllm_stack.git import Git
    from vllm_stack.pins import Pin
    from vllm_stack.wheelzip import Member
    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class ScratchTree:
    """A tree that is there while a test runs."""

    folder: Path
    scratch: Path
    """An empty folder beside it, which vanishes with it."""


@contextmanager
def open_tree(git: Git, commit: str, official: Path | None) -> Iterator[ScratchTree]:
    """Write the files of ``commit`` to a scratch folder, and remove it with all that a test left there.

    ``official`` is what :func:`official_files` returned: where the tree has no such file, a link to it.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-stack-test-") as name:
        tree = ScratchTree(Path(name, "tree"), Path(name, "scratch"))
        tree.folder.mkdir()
        tree.scratch.mkdir()
        with scratch_index(git, commit) as index:
            index.run("checkout-index", "--all", "--quiet", work_tree=tree.folder)
        if official is not None:
            _link(official, tree.folder)
        yield tree


def _link(official: Path, tree: Path) -> None:
    for folder, _, names in os.walk(official):
        there = tree / Path(folder).relative_to(official)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not os.path.lexists(there / name):
                (there / name).symlink_to(Path(folder, name))


def official_files(workspace: Workspace, pin: Pin, base: Base, arch: str, fetcher: Fetcher) -> Path:
    """Return a folder of the cache with what the official wheel has and the sources lack.

    Compiled modules, files that the build made, the metadata: with these linked in, the sources can be
    imported. They come from the pinned wheel and from nowhere else; an installation could be a patched one,
    whose modules would then be there before their patch. NetworkError and IntegrityError as from a fetch.
    """
    wheel = pin.wheel(arch)
    folder = workspace.cache / "official" / f"{wheel.sha256[:16]}-{base.commit[:16]}"
    if folder.is_dir():
        return folder
    path = fetcher.fetch(pin.distribution, wheel)
    fetcher.progress.note(f"unpacking what {wheel.filename} has beyond the sources, once")
    known = set(base.git.run("ls-tree", "-r", "-z", "--name-only", base.commit).fields)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder.parent) as temporary:
        unpacked = Path(temporary, "files")
        unpacked.mkdir()
        with WheelArchive.open(path) as archive:
            for member in archive.members.values():
                if member.name not in known:
                    _unpack(archive, member, unpacked)
        if not folder.exists():
            unpacked.rename(folder)
    return folder


def _unpack(archive: WheelArchive, member: Member, folder: Path) -> None:
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for block in archive.content(member):
            file.write(block)
    path.chmod(0o555 if member.executable else 0o444)

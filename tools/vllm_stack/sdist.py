"""Reading a source distribution: its files, checked before anything is made of them."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.classify import matches
from vllm_stack.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_stack.pins import Layout


@dataclass(frozen=True)
class SourceFile:
    """A file of a source distribution; ``path`` is relative to its root."""

    path: str
    mode: str
    """git's mode: 100644, 100755 or 120000 (symbolic link, whose target is ``data``)."""
    data: bytes


def read_sdist(path: Path, layout: Layout) -> Iterator[SourceFile]:
    """Yield the files of the sdist at ``path`` that upstream's repository has too, in archive order.

    The generated ones that ``layout`` names are left out. IntegrityError for an archive that is
    damaged, or that holds something other than plain files below one folder.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                file = _source_file(archive, member)
                if file is not None and not matches(file.path, layout.generated):
                    yield file
    except (tarfile.TarError, EOFError, OSError) as error:
        raise IntegrityError(f"{path.name} is not a readable source archive: {error}") from error


def _source_file(archive: tarfile.TarFile, member: tarfile.TarInfo) -> SourceFile | None:
    _, _, relative = member.name.partition("/")
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or ".git" in parts or "" in parts[:-1]:
        raise IntegrityError(f"the source archive holds an unsafe name: {member.name!r}")
    if member.isdir():
        return None
    if not relative:
        raise IntegrityError(f"the source archive holds {member.name!r} outside its folder")
    if member.issym():
        return SourceFile(relative, "120000", member.linkname.encode())
    if not member.isfile():
        raise IntegrityError(f"the source archive holds {member.name!r}, which is not a plain file")
    content = archive.extractfile(member)
    if content is None:
        raise IntegrityError(f"the source archive's {member.name!r} cannot be read")
    return SourceFile(relative, "100755" if member.mode & 0o100 else "100644", content.read())


def read_member(path: Path, wanted: str) -> bytes | None:
    """Return the bytes of one file of the sdist at ``path``, named relative to its folder; None without it.

    IntegrityError for an archive that is damaged.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.isfile() and member.name.partition("/")[2] == wanted:
                    content = archive.extractfile(member)
                    return None if content is None else content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise IntegrityError(f"{path.name} is not a readable source archive: {error}") from error
    return None


#: Made by running what lies beside them.
_LEFT_BEHIND = ("__pycache__", ".git")


def read_folder(folder: Path, layout: Layout) -> Iterator[SourceFile]:
    """Yield the files of an unpacked sdist that upstream's repository has too, sorted by path.

    IntegrityError for something that is neither a plain file nor a symbolic link.
    """
    for path in sorted(folder.rglob("*"), key=lambda found: found.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        if any(part in _LEFT_BEHIND for part in relative.parts) or matches(name, layout.generated):
            continue
        if path.is_symlink():
            yield SourceFile(name, "120000", os.fsencode(path.readlink()))
        elif path.is_file():
            mode = "100755" if path.stat().st_mode & 0o100 else "100644"
            yield SourceFile(name, mode, path.read_bytes())
        elif not path.is_dir():
            raise IntegrityError(f"{path} is neither a plain file nor a symbolic link")

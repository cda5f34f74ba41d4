"""Bases: the commit a stack starts from, imported from the pinned source distribution.

An sdist has no history, but its blobs are all that strict and three-way application need. The commit
has a fixed author, date and message, so that the same archive gives the same commit id everywhere.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.atomic import write_atomic
from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.git import EPOCH, IDENTITY, Git, GitError
from vllm_stack.hashing import sha256_bytes, sha256_file
from vllm_stack.sdist import SourceFile, read_sdist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.pins import Pin
    from vllm_stack.workspace import Workspace

BASE_REF = "refs/stack/base"
#: Part of the key of a cached base: raise it when the import changes.
_IMPORT_VERSION = 3
#: File of a cached base that says which commit the import gave.
_COMMIT_FILE = "vllm-stack-base"
#: No attribute of the tree may change bytes on their way in or out, or the form of a diff.
ATTRIBUTES = (
    "* -text -ident -filter -working-tree-encoding -export-subst -export-ignore !diff !merge !whitespace\n"
)


@dataclass(frozen=True)
class Base:
    """An imported release in a bare repository of the cache."""

    git: Git
    commit: str

    @classmethod
    def find(cls, workspace: Workspace, pin: Pin) -> Base | None:
        """Return the base of ``pin`` if it was imported before.

        IntegrityError when it is damaged, or no longer at the commit that the import gave.
        """
        folder = _folder(workspace, pin)
        if not folder.is_dir():
            return None
        git = Git(folder)
        hint = f"remove {folder} and run the command again"
        try:
            commit, imported = git.resolve(BASE_REF), (folder / _COMMIT_FILE).read_text("ascii")
        except (GitError, OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"the cached base {folder} is damaged", hint=hint) from error
        if commit != imported:
            raise IntegrityError(
                f"the cached base {folder} is at {commit}, it was imported as {imported}", hint=hint
            )
        return cls(git, commit)

    @classmethod
    def ensure(cls, workspace: Workspace, pin: Pin, sdist: Path) -> Base:
        """Return the base of ``pin``, importing the verified archive ``sdist`` if need be.

        Raises IntegrityError when the archive is not the pinned one or not readable.
        """
        found = cls.find(workspace, pin)
        if found is None:
            _import(_folder(workspace, pin), pin, sdist)
            found = cls.find(workspace, pin)
        if found is None:
            raise BuildError(f"the imported base {_folder(workspace, pin)} is gone again")
        return found


def _folder(workspace: Workspace, pin: Pin) -> Path:
    return workspace.bases / f"{pin.distribution}-{pin.release}-{_key(pin)}.git"


def _key(pin: Pin) -> str:
    parts = [str(_IMPORT_VERSION), pin.sdist.sha256, *pin.layout.generated]
    return sha256_bytes("\0".join(parts).encode())[:16]


def _import(folder: Path, pin: Pin, sdist: Path) -> None:
    actual = sha256_file(sdist)
    if actual != pin.sdist.sha256:
        raise IntegrityError(f"{sdist}: expected sha256 {pin.sdist.sha256}, it has {actual}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".import-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"cannot write to the cache: {error}") from error
    try:
        git = init_repository(temporary / "base.git", bare=True)
        _fast_import(git, _stream(pin, sdist))
        write_atomic(temporary / "base.git" / _COMMIT_FILE, git.resolve(BASE_REF).encode("ascii"))
        if not folder.exists():
            git_dir = temporary / "base.git"
            git_dir.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def init_repository(folder: Path, *, bare: bool) -> Git:
    """Make an empty repository that converts nothing, and return git for it."""
    kind = ["--bare"] if bare else []
    Git(None).run("init", "--quiet", "--template=", *kind, folder, cwd=folder.parent)
    git = Git(folder) if bare else Git.checkout(folder)
    assert git.git_dir is not None  # noqa: S101 - both constructors above set it
    (git.git_dir / "info").mkdir(exist_ok=True)
    (git.git_dir / "info" / "attributes").write_text(ATTRIBUTES)
    return git


def _fast_import(git: Git, stream: Iterator[bytes]) -> None:
    # The default compression takes twice the time for a pack that is a tenth smaller.
    with git.popen("-c", "pack.compression=1", "fast-import", "--quiet", "--done") as process:
        assert process.stdin is not None  # noqa: S101 - popen opens a pipe
        try:
            for chunk in stream:
                process.stdin.write(chunk)
            process.stdin.close()
        except BrokenPipeError:
            pass  # git's own message follows from its exit status
        except BaseException:
            process.kill()
            raise
        stderr = process.stderr.read() if process.stderr else b""
    if process.returncode:
        detail = stderr.decode("utf-8", "replace").strip()
        raise BuildError(f"git could not import the sources: {detail}", hint="is the disk of the cache full?")


def _stream(pin: Pin, sdist: Path) -> Iterator[bytes]:
    """Yield the input of ``git fast-import`` for one commit."""
    name, email = IDENTITY
    message = (
        f"Import {pin.distribution} {pin.release}\n\n"
        f"Source: {pin.sdist.filename}\nSha256: {pin.sdist.sha256}\n"
    ).encode()
    yield f"commit {BASE_REF}\ncommitter {name} <{email}> {EPOCH}\n".encode()
    yield b"data %d\n%s\n" % (len(message), message)
    for file in read_sdist(sdist, pin.layout):
        yield _modify(file)
    yield b"done\n"


def _modify(file: SourceFile) -> bytes:
    escaped = file.path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    head = f'M {file.mode} inline "{escaped}"\n'.encode()
    return head + b"data %d\n%s\n" % (len(file.data), file.data)

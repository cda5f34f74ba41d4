"""Bases: the commit a stack starts from, imported from the pinned source distribution.

An sdist has no history, but its blobs are all that strict and three-way application need. The commit
has a fixed author, date and message, so that the same archive gives the same commit id everywhere.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_stack.atomic import write_atomic
from vllm_stack.errors import BuildError, IntegrityError
from vllm_stack.git import EPOCH, IDENTITY, Git, GitError
from vllm_stack.hashing import sha256_bytes, sha256_file
from vllm_stack.sdist import SourceFile, read_sdist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
        return cls._at(_folder(workspace, pin))

    @classmethod
    def _at(cls, folder: Path) -> Base | None:
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
        folder = _folder(workspace, pin)
        if not folder.is_dir():
            actual = sha256_file(sdist)
            if actual != pin.sdist.sha256:
                raise IntegrityError(f"{sdist}: expected sha256 {pin.sdist.sha256}, it has {actual}")
            with new_base(folder) as git:
                import_files(git, _message(pin), read_sdist(sdist, pin.layout))
        return cls._imported(folder)

    @classmethod
    def ensure_from(cls, workspace: Workspace, origin: Origin, fill: Callable[[Git, bytes], None]) -> Base:
        """Return the base of something else than a pinned archive; ``fill`` imports it if need be.

        It gets git for a new bare repository, and the message of the commit that it has to put at BASE_REF.
        """
        folder = workspace.bases / f"{origin.distribution}-{origin.release}-{origin.key}.git"
        if not folder.is_dir():
            with new_base(folder) as git:
                fill(git, origin.message)
        return cls._imported(folder)

    @classmethod
    def _imported(cls, folder: Path) -> Base:
        found = cls._at(folder)
        if found is None:
            raise BuildError(f"the imported base {folder} is gone again")
        return found


@dataclass(frozen=True)
class Origin:
    """Where a base comes from that is not made of a pinned archive."""

    distribution: str
    release: str
    lines: tuple[str, ...]
    """What identifies the content: ``Name: value``, for the message of the commit."""

    @property
    def key(self) -> str:
        """What sets the cached base apart from others of the release."""
        return sha256_bytes("\0".join([str(_IMPORT_VERSION), *self.lines]).encode())[:16]

    @property
    def message(self) -> bytes:
        """The message of the commit."""
        return message_of(self.distribution, self.release, self.lines)


def _folder(workspace: Workspace, pin: Pin) -> Path:
    return workspace.bases / f"{pin.distribution}-{pin.release}-{_key(pin)}.git"


def _key(pin: Pin) -> str:
    parts = [str(_IMPORT_VERSION), pin.sdist.sha256, *pin.layout.generated]
    return sha256_bytes("\0".join(parts).encode())[:16]


@contextmanager
def new_base(folder: Path) -> Iterator[Git]:
    """Yield git for an empty bare repository that becomes ``folder`` once the block has set BASE_REF."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".import-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"cannot write to the cache: {error}") from error
    try:
        git_dir = temporary / "base.git"
        git = init_repository(git_dir, bare=True)
        yield git
        write_atomic(git_dir / _COMMIT_FILE, git.resolve(BASE_REF).encode("ascii"))
        if not folder.exists():
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


def message_of(distribution: str, release: str, lines: Sequence[str]) -> bytes:
    """Return the message of an import: it is part of the commit's id."""
    return "\n".join([f"Import {distribution} {release}", "", *lines, ""]).encode()


def _message(pin: Pin) -> bytes:
    lines = (f"Source: {pin.sdist.filename}", f"Sha256: {pin.sdist.sha256}")
    return message_of(pin.distribution, pin.release, lines)


def import_files(git: Git, message: bytes, files: Iterable[SourceFile]) -> None:
    """Import ``files`` as one commit at BASE_REF."""
    _fast_import(git, _stream(message, files))


def _stream(message: bytes, files: Iterable[SourceFile]) -> Iterator[bytes]:
    """Yield the input of ``git fast-import`` for one commit."""
    name, email = IDENTITY
    yield f"commit {BASE_REF}\ncommitter {name} <{email}> {EPOCH}\n".encode()
    yield b"data %d\n%s\n" % (len(message), message)
    for file in files:
        yield _modify(file)
    yield b"done\n"


def _modify(file: SourceFile) -> bytes:
    escaped = file.path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    head = f'M {file.mode} inline "{escaped}"\n'.encode()
    return head + b"data %d\n%s\n" % (len(file.data), file.data)

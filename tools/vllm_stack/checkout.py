"""The working checkout of a target: one commit per patch on top of the base.

What the tools know about a checkout is in ``.git/vllm-stack.json``, written before the branch moves.
Which commit is which patch file is kept as git notes, which follow a commit through amend and rebase.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_stack.atomic import write_atomic
from vllm_stack.base import BASE_REF, Base, init_repository
from vllm_stack.errors import BuildError, WorkInProgressError
from vllm_stack.git import Git

if TYPE_CHECKING:
    from collections.abc import Mapping

BRANCH = "stack"
NOTES_REF = "refs/notes/vllm-stack"
SAVED_REFS = "refs/stack/saved"
_STATE_SCHEMA = 1
_IN_PROGRESS = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or `git am`",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
}
#: For the git commands that a person runs in the checkout.
_CONFIG = {
    "core.autocrlf": "false",
    "notes.rewriteRef": NOTES_REF,
    "notes.rewriteMode": "overwrite",
    "rebase.autoSquash": "true",
    "format.useAutoBase": "false",
}


@dataclass(frozen=True)
class CheckoutState:
    """What the tools last put into a checkout or took out of it."""

    target: str
    base: str
    head: str
    stack_id: str


@dataclass(frozen=True)
class Checkout:
    """A target's checkout, which exists."""

    folder: Path
    git: Git
    state: CheckoutState

    @classmethod
    def find(cls, folder: Path) -> Checkout | None:
        """Return the checkout at ``folder``, or None when there is nothing.

        Raises WorkInProgressError for a folder that these tools did not make.
        """
        if not folder.exists():
            return None
        state = _read_state(folder)
        if state is None:
            raise WorkInProgressError(
                f"{folder} is not a checkout of this tool", hint="move it away; nothing in it was touched"
            )
        return cls(folder, Git.checkout(folder), state)

    @property
    def head(self) -> str:
        """The commit that is checked out."""
        return self.git.resolve("HEAD")

    def commits(self) -> list[str]:
        """Return the commits from the base to HEAD, oldest first."""
        return self.git.run("rev-list", "--reverse", f"{self.state.base}..HEAD").lines

    def in_progress(self) -> str | None:
        """Name the git operation that is under way, if there is one."""
        for name, operation in _IN_PROGRESS.items():
            if (self.folder / ".git" / name).exists():
                return operation
        return None

    def require_no_operation(self) -> None:
        """Raise WorkInProgressError while a rebase, merge or the like is under way."""
        operation = self.in_progress()
        if operation:
            raise WorkInProgressError(
                f"{operation} is under way in {self.folder}", hint="finish it with git, or abort it"
            )

    def require_clean(self) -> None:
        """Raise WorkInProgressError with the list of uncommitted changes, if there are any."""
        dirty = self.git.status()
        if dirty:
            raise WorkInProgressError(
                f"there is uncommitted work in {self.folder}",
                details=dirty,
                hint="commit it (git commit --fixup=COMMIT, git rebase -i --autosquash) or stash it",
            )

    def names(self) -> dict[str, str]:
        """Return the patch file's name for each commit that has a note."""
        if not self.git.exists(NOTES_REF):
            return {}
        found = {}
        for line in self.git.run("notes", "--ref", NOTES_REF, "list").lines:
            note, commit = line.split()
            found[commit] = self.git.run("cat-file", "blob", note).text.strip()
        return found

    def save_work(self) -> str:
        """Keep HEAD and everything uncommitted under a ref of its own; return the ref."""
        number = len(self.git.run("for-each-ref", "--format=%(refname)", SAVED_REFS).lines) + 1
        with tempfile.TemporaryDirectory(prefix="vllm-stack-") as temporary:
            index = {"GIT_INDEX_FILE": str(Path(temporary) / "index")}
            self.git.run("read-tree", "HEAD", env=index)
            self.git.run("add", "--all", env=index)
            tree = self.git.run("write-tree", env=index).text
        message = b"Work that `apply --force` moved out of the way\n"
        saved = self.git.run("commit-tree", tree, "-p", "HEAD", "-F", "-", stdin=message).text
        ref = f"{SAVED_REFS}/{number}"
        self.git.run("update-ref", ref, saved, "")
        return ref

    def with_base(self, base: str) -> Checkout:
        """Return the checkout with another base, which its repository holds already."""
        return replace(self, state=replace(self.state, base=base))

    def record(self, head: str, stack_id: str, names: Mapping[str, str]) -> Checkout:
        """Write down that ``head`` holds the stack ``stack_id`` and which commit is which file."""
        state = CheckoutState(self.state.target, self.state.base, head, stack_id)
        _write_state(self.folder, state)
        for commit, name in names.items():
            self.git.run("notes", "--ref", NOTES_REF, "add", "--force", "--message", name, commit)
        return Checkout(self.folder, self.git, state)

    def move_to(self, commit: str) -> None:
        """Check ``commit`` out as the stack's branch. The caller made sure that nothing is lost."""
        self.git.run("checkout", "--quiet", "--force", "-B", BRANCH, commit)


def _state_file(folder: Path) -> Path:
    return folder / ".git" / "vllm-stack.json"


def _read_state(folder: Path) -> CheckoutState | None:
    try:
        document: dict[str, Any] = json.loads(_state_file(folder).read_bytes())
        if document.pop("schema") != _STATE_SCHEMA:
            return None
        return CheckoutState(**document)
    except (OSError, ValueError, KeyError, TypeError):
        # Absent or not ours: the caller refuses to touch the folder.
        return None


def _write_state(folder: Path, state: CheckoutState) -> None:
    document = {"schema": _STATE_SCHEMA, **asdict(state)}
    write_atomic(_state_file(folder), (json.dumps(document, indent=2) + "\n").encode())


def fetch_base(git: Git, base: Base) -> None:
    """Bring the base's commit into another repository."""
    git.run("fetch", "--quiet", "--no-tags", base.git.git_dir or "", f"+{BASE_REF}:{BASE_REF}")


def create_checkout(folder: Path, target: str, base: Base) -> Checkout:
    """Make a checkout of the bare base at ``folder``, which appears whole or not at all."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise BuildError(f"cannot make a checkout in {folder.parent}: {error}") from error
    try:
        part = temporary / "checkout"
        part.mkdir()
        git = init_repository(part, bare=False)
        for key, value in _CONFIG.items():
            git.run("config", "--local", key, value)
        fetch_base(git, base)
        git.run("checkout", "--quiet", "-B", BRANCH, base.commit)
        # git warns on every amend and rebase while the notes do not exist.
        git.run("notes", "--ref", NOTES_REF, "add", "--message", "base", base.commit)
        _write_state(part, CheckoutState(target, base.commit, base.commit, ""))
        part.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Checkout(folder, Git.checkout(folder), CheckoutState(target, base.commit, base.commit, ""))

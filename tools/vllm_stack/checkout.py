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

    from vllm_stack.stack import Stack

BRANCH = "stack"
NOTES_REF = "refs/notes/vllm-stack"
SAVED_REFS = "refs/stack/saved"
_STATE_SCHEMA = 2
_IN_PROGRESS = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or `git am`",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "sequencer": "a series of cherry-picks or reverts",
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
    files: dict[str, str]
    """sha256 of each patch file as it was then."""
    pending: str | None = None
    """The commit that an `apply` was moving to when it was interrupted."""


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
        dirty = [*self.git.status(), *self._hidden()]
        if dirty:
            raise WorkInProgressError(
                f"there is uncommitted work in {self.folder}",
                details=dirty,
                hint="commit it (git commit --fixup=COMMIT, git rebase -i --autosquash) or stash it",
            )

    def _hidden(self) -> list[str]:
        """Return files whose changes git was told not to see."""
        listed = self.git.run("ls-files", "-v", "-z").fields
        return [
            f"assume-unchanged or skip-worktree: {entry[2:]}" for entry in listed if entry[0] not in "HMRCK?"
        ]

    def unsaved_commits(self, *saved: str) -> list[str]:
        """Return the commits of HEAD and of the stack's branch that no patch file has, one line each.

        ``saved`` are commits that are known elsewhere.
        """
        tips = [
            self.head,
            *self.git.run("for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}").lines,
        ]
        known = [
            f"^{commit}"
            for commit in (self.state.head, self.state.pending, self.state.base, *saved)
            if commit
        ]
        found = self.git.run("log", "--format=%h %s", *dict.fromkeys(tips), *known).lines
        # Commits that were taken away are a change too.
        ours = {self.state.head, self.state.pending, *saved}
        return found or [
            f"at {tip}, not at {self.state.head}" for tip in dict.fromkeys(tips) if tip not in ours
        ]

    def left_by_interruption(self) -> bool:
        """Say whether all that is uncommitted is what an interrupted `apply` was writing."""
        if self.state.pending is None:
            return False
        return all(self._is_of_either(line[3:]) for line in self.git.status())

    def _is_of_either(self, path: str) -> bool:
        """Say whether a path is as in the commit that apply came from or as in the one it went to."""
        file = self.folder / path
        if not file.exists() and not file.is_symlink():
            return True
        blob = self.git.run("hash-object", "--no-filters", "--", file, check=False).text
        commits = (self.state.head, self.state.pending)
        return any(self.git.run("rev-parse", f"{at}:{path}", check=False).text == blob for at in commits)

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
        """Keep all work under a ref of its own, make the checkout clean, and return the ref.

        The saved commit has the files of the working tree, untracked ones included; its parents are
        HEAD, the index, and the stack's branch if that is elsewhere.
        """
        refs = self.git.run("for-each-ref", "--format=%(refname:lstrip=3)", SAVED_REFS).lines
        ref = f"{SAVED_REFS}/{max((int(ref) for ref in refs if ref.isdigit()), default=0) + 1}"
        with tempfile.TemporaryDirectory(prefix="vllm-stack-") as temporary:
            index = {"GIT_INDEX_FILE": str(Path(temporary) / "index")}
            self.git.run("read-tree", "HEAD", env=index)
            self.git.run("add", "--all", env=index)
            tree = self.git.run("write-tree", env=index).text
        staged = self._commit(self.git.run("write-tree").text, [self.head], b"Index at `apply --force`\n")
        branch = self.git.run("for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}").lines
        parents = list(dict.fromkeys([self.head, staged, *branch]))
        saved = self._commit(tree, parents, b"Work that `apply --force` moved out of the way\n")
        self.git.run("update-ref", ref, saved, "")
        self.git.run("reset", "--quiet", "--hard", "HEAD")
        self.git.run("clean", "--quiet", "--force", "-d")
        return ref

    def _commit(self, tree: str, parents: list[str], message: bytes) -> str:
        words = [word for parent in parents for word in ("-p", parent)]
        return self.git.run("commit-tree", tree, *words, "-F", "-", stdin=message).text

    def with_base(self, base: str) -> Checkout:
        """Return the checkout with another base, which its repository holds already."""
        return replace(self, state=replace(self.state, base=base))

    def record(self, head: str, stack: Stack, names: Mapping[str, str]) -> Checkout:
        """Write down that ``head`` holds ``stack`` and which commit is which file."""
        for commit, name in names.items():
            self.git.run("notes", "--ref", NOTES_REF, "add", "--force", "--message", name, commit)
        files = {patch.name: patch.sha256 for patch in stack.patches}
        state = replace(self.state, head=head, stack_id=stack.stack_id, files=files, pending=None)
        _write_state(self.folder, state)
        return replace(self, state=state)

    def move_to(self, commit: str, *, force: bool) -> None:
        """Check ``commit`` out as the stack's branch, having written down that this is under way.

        Raises WorkInProgressError when git refuses, e.g. because an ignored file would be overwritten;
        with ``force`` the caller made sure that nothing is lost.
        """
        _write_state(self.folder, replace(self.state, pending=commit))
        how = "--force" if force else "--no-overwrite-ignore"
        done = self.git.run("checkout", "--quiet", how, "-B", BRANCH, commit, check=False)
        if done.returncode:
            raise WorkInProgressError(
                f"git cannot check the stack out in {self.folder}",
                details=done.stderr.decode("utf-8", "replace").splitlines(),
                hint="mend what git names and run the same command again",
            )


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


def read_state_bytes(folder: Path) -> bytes:
    """Return what is written down about the checkout at ``folder``."""
    return _state_file(folder).read_bytes()


def write_state_bytes(folder: Path, data: bytes) -> None:
    """Put back what :func:`read_state_bytes` returned."""
    write_atomic(_state_file(folder), data)


def _write_state(folder: Path, state: CheckoutState) -> None:
    document = {"schema": _STATE_SCHEMA, **asdict(state)}
    write_atomic(_state_file(folder), (json.dumps(document, indent=2) + "\n").encode())


def bring_commit(git: Git, base: Base, commit: str) -> None:
    """Copy ``commit`` (the base's, or one on top of it) with its objects into another repository.

    As a pack, not by fetching: what a fetch brings depends on the configuration of both repositories.
    """
    if not git.exists(f"{commit}^{{commit}}"):
        known = f"^{base.commit}\n" if git.exists(f"{base.commit}^{{commit}}") else ""
        request = f"{commit}\n{known}".encode()
        pack = base.git.run("pack-objects", "--revs", "--stdout", "--quiet", stdin=request).stdout
        git.run("index-pack", "--stdin", stdin=pack)
    git.run("update-ref", BASE_REF, base.commit)


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
        bring_commit(git, base, base.commit)
        git.run("checkout", "--quiet", "-B", BRANCH, base.commit)
        # git warns on every amend and rebase while the notes do not exist.
        git.run("notes", "--ref", NOTES_REF, "add", "--message", "base", base.commit)
        _write_state(part, CheckoutState(target, base.commit, base.commit, "", {}))
        part.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Checkout(folder, Git.checkout(folder), CheckoutState(target, base.commit, base.commit, "", {}))

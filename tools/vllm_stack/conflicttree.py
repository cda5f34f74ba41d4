"""The working tree in which a person finishes a patch that a rebase stopped at.

Its repository lies beside it and borrows the objects of both releases. HEAD is the new release with the
patches before; the files are what merging gave, with conflict markers (zdiff3) that name the releases.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_stack.base import init_repository
from vllm_stack.errors import ConflictError, WorkInProgressError
from vllm_stack.git import Git
from vllm_stack.merging import Side, Stages, sides, with_sides
from vllm_stack.workbench import borrow_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_stack.base import Base
    from vllm_stack.replay import Settled

_MARKER = re.compile(rb"^(?:<{7}|\|{7}|>{7}) ")
_SEPARATOR = b"======="
_BUSY = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or `git am`",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "MERGE_HEAD": "a merge",
}
#: For the git commands that a person runs in the tree.
_CONFIG = {
    "core.autocrlf": "false",
    "commit.cleanup": "verbatim",
    "merge.conflictStyle": "zdiff3",
}


@dataclass(frozen=True)
class Stop:
    """Where a rebase waits: all that is needed to put the tree there, and to read it back."""

    patch: str
    conflict: str
    before: str
    """Commit of the new release with the patches before."""
    start: str
    """Tree that a resolution starts from: what merged, conflicted files as the new release has them."""
    shown: str
    """Tree of what a person finds on disk."""
    open: tuple[str, ...]
    """Paths that conflict."""
    unmarked: tuple[str, ...]
    """Those of them that hold no markers, so that git has to be told that they are resolved."""
    touched: tuple[str, ...]
    """Paths of the patch."""
    verdict: str
    """What became of the patch."""

    @classmethod
    def decode(cls, document: dict[str, Any]) -> Stop:
        """Return the stop that ``dataclasses.asdict`` and JSON made ``document`` of."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class Harvest:
    """What a person made of a stop."""

    tree: str
    diff: bytes
    """From the stop's start to ``tree``."""
    message: str | None
    """Message of the commit that the person made, if they made one."""


@dataclass(frozen=True)
class ConflictTree:
    """The tree of one rebase, below its folder."""

    folder: Path

    @property
    def work_tree(self) -> Path:
        """Where a person works."""
        return self.folder / "tree"

    @property
    def git(self) -> Git:
        """Git on the rebase's repository, with the tree."""
        return Git(self.folder / "repo.git", self.work_tree)

    @property
    def store(self) -> Git:
        """Git on the rebase's repository alone."""
        return Git(self.folder / "repo.git")

    def create(self, *bases: Base) -> None:
        """Make the repository, which appears whole, if it is not there; let it see the bases."""
        if not (self.folder / "repo.git").is_dir():
            part = Path(tempfile.mkdtemp(prefix=".repo-", dir=self.folder))
            git = init_repository(part / "repo.git", bare=True)
            git.run("config", "core.bare", "false")
            for key, value in _CONFIG.items():
                git.run("config", key, value)
            (part / "repo.git").rename(self.folder / "repo.git")
            part.rmdir()
        borrow_objects(self.store, *bases)

    def prepare(self, stop: Stop, stages: Sequence[Stages], message: bytes) -> None:
        """Put the tree where the rebase stopped. What was in it is overwritten; it may be half written."""
        self.work_tree.mkdir(exist_ok=True)
        (self.work_tree / ".git").write_text("gitdir: ../repo.git\n")
        repository = self.folder / "repo.git"
        for lock in ("index.lock", "HEAD.lock"):
            (repository / lock).unlink(missing_ok=True)
        git = self.git
        git.run("update-ref", "--no-deref", "HEAD", stop.before)
        if git.run("read-tree", "--reset", "-u", stop.shown, check=False).returncode:
            # An index that git cannot read any more: nothing of the tree is worth keeping.
            (repository / "index").unlink(missing_ok=True)
            git.run("read-tree", "--reset", "-u", stop.shown)
        git.run("update-index", "-z", "--index-info", stdin=_index_lines(stages))
        (repository / "MERGE_MSG").write_bytes(message)

    def is_there(self, stop: Stop) -> bool:
        """Say whether the tree that ``stop`` needs is there; one that needs none always is."""
        return not stop.conflict or (self.work_tree / ".git").is_file()

    def harvest(self, stop: Stop) -> Harvest:
        """Read what the person made. Raises WorkInProgressError when something of it is not finished."""
        git = self.git
        message = self._message(stop)
        self._require_decided(stop)
        with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            shutil.copy(self.folder / "repo.git" / "index", index["GIT_INDEX_FILE"])
            git.run("add", "--update", "--", ".", env=index)
            there = [path for path in (*stop.touched, *stop.open) if _is_file(self.work_tree / path)]
            if there:
                git.run("--literal-pathspecs", "add", "--force", "--", *dict.fromkeys(there), env=index)
            tree = git.run("write-tree", env=index).text
        self._require_no_markers(stop, tree)
        words = ("diff-tree", "-p", "--binary", "--full-index", "--no-renames", stop.start, tree)
        return Harvest(tree, git.run(*words).stdout, message)

    def _message(self, stop: Stop) -> str | None:
        git = self.git
        for name, operation in _BUSY.items():
            if (self.folder / "repo.git" / name).exists():
                raise WorkInProgressError(
                    f"{operation} is under way in {self.work_tree}", hint="finish it, or abort it"
                )
        if git.run("merge-base", "--is-ancestor", stop.before, "HEAD", check=False).returncode:
            raise WorkInProgressError(
                f"HEAD of {self.work_tree} does not descend from {stop.before[:12]}, where the patch belongs",
                hint=f"git reset --soft {stop.before[:12]}",
            )
        commits = git.run("rev-list", "--reverse", f"{stop.before}..HEAD").lines
        if len(commits) > 1:
            raise WorkInProgressError(
                f"{self.work_tree} has {len(commits)} commits for one patch",
                details=git.run("log", "--format=%h %s", f"{stop.before}..HEAD").lines,
                hint=f"git reset --soft {stop.before[:12]}, and commit once or not at all",
            )
        return git.run("log", "-1", "--format=%B", commits[0]).text + "\n" if commits else None

    def _require_decided(self, stop: Stop) -> None:
        git = self.git
        unmerged = {field.partition("\t")[2] for field in git.run("ls-files", "-z", "--unmerged").fields}
        undecided = sorted(unmerged & set(stop.unmarked))
        if undecided:
            raise ConflictError(
                f"{len(undecided)} files of {stop.patch} wait for your word",
                details=undecided,
                hint=f"in {self.work_tree}: `git add FILE` takes it as it stands, `git rm FILE` drops it",
            )
        known = {*stop.touched, *stop.open}
        strange = [line[3:] for line in git.status() if line.startswith("?? ") and line[3:] not in known]
        if strange:
            raise WorkInProgressError(
                "there are files that the patch does not have",
                details=strange,
                hint="`git add` those that belong to it, remove the others",
            )

    def _require_no_markers(self, stop: Stop, tree: str) -> None:
        marked = [*marked_lines(self.git, stop.before, tree), *_left_separators(self.git, stop, tree)]
        left = [f"{path}:{number}: {text}" for path, number, text in sorted(marked)]
        if left:
            raise ConflictError(
                f"{stop.patch} still has conflict markers",
                details=left,
                hint=f"edit the files in {self.work_tree}, then run --continue again",
            )


def _is_file(path: Path) -> bool:
    return path.is_file() or path.is_symlink()


def _index_lines(stages: Iterable[Stages]) -> bytes:
    """Return the entries that make paths unmerged, for ``update-index -z --index-info``."""
    lines = []
    for at in stages:
        lines.append(f"0 {'0' * 40}\t{at.path}")
        for number, side in enumerate((at.base, at.ours, at.theirs), start=1):
            if side is not None:
                lines.append(f"{side.mode} {side.blob} {number}\t{at.path}")
    return "\0".join(lines).encode("utf-8", "surrogateescape")


def marked_lines(git: Git, before: str, tree: str) -> list[tuple[str, int, str]]:
    """Return the conflict markers in the files that differ from ``before``: path, line, text.

    A line that ``before`` has in that file is upstream's own.
    """
    words = ("diff-tree", "-r", "-z", "--name-only", "--no-renames", "--diff-filter=AM")
    found = []
    for path in git.run(*words, before, tree).fields:
        known = git.run("cat-file", "blob", f"{before}:{path}", check=False).stdout.split(b"\n")
        for number, line in enumerate(git.blob(tree, path).split(b"\n"), start=1):
            if _MARKER.match(line) and line not in known:
                found.append((path, number, line.decode("utf-8", "replace")))
    return found


def _left_separators(git: Git, stop: Stop, tree: str) -> list[tuple[str, int, str]]:
    """Return the lines between two versions that were left in files that had markers: path, line, text.

    Alone such a line can also be text, e.g. under a title: there may be as many as were not markers.
    """
    found = []
    for path in sides(git, tree, [path for path in stop.open if path not in stop.unmarked]):
        shown = git.blob(stop.shown, path).splitlines()
        text = shown.count(_SEPARATOR) - sum(line.startswith(b"<<<<<<< ") for line in shown)
        numbers = [at for at, line in enumerate(git.blob(tree, path).splitlines(), 1) if line == _SEPARATOR]
        if len(numbers) > text:
            found += [(path, number, _SEPARATOR.decode()) for number in numbers]
    return found


def stop_at(settled: Settled, old: str, new: str) -> tuple[Stop, tuple[Stages, ...]]:
    """Return where a rebase stops for a patch, and what conflicts there.

    ``old`` and ``new`` name the releases in the markers.
    """
    place, attempt = settled.place, settled.attempt
    git = place.git
    start = attempt.tree or git.tree(place.new_before)
    stages = attempt.conflicts
    marked: dict[str, Side | None] = {}
    for at in stages:
        side = _marked(git, at, (new, old, place.patch.name))
        if side is not None:
            marked[at.path] = side
    shown = with_sides(git, attempt.marked or start, marked)
    paths = tuple(at.path for at in stages)
    unmarked = tuple(path for path in paths if path not in marked)
    stop = Stop(
        place.patch.name,
        settled.done.conflict or "",
        place.new_before,
        start,
        shown,
        paths,
        unmarked,
        place.patch.paths,
        str(settled.done.verdict),
    )
    return stop, stages


def _marked(git: Git, at: Stages, labels: tuple[str, str, str]) -> Side | None:
    """Return the file with conflict markers; None when they cannot show the conflict."""
    if at.ours is None or at.theirs is None or "120000" in (at.ours.mode, at.theirs.mode):
        return None
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as folder:
        files = []
        for name, side in (("ours", at.ours), ("base", at.base), ("theirs", at.theirs)):
            files.append(Path(folder) / name)
            data = git.data(side.blob) if side else b""
            files[-1].write_bytes(data)
        named = [word for label in labels for word in ("-L", label)]
        done = git.run("merge-file", "-p", "--zdiff3", *named, *files, check=False)
    if done.returncode <= 0 or done.returncode > 127:  # noqa: PLR2004 - git's: conflicts up to 127, else an error
        return None
    blob = git.run("hash-object", "-w", "--no-filters", "--stdin", stdin=done.stdout).text
    # The patch may change the mode too; where both did, git's own rule is the new release's.
    changed = at.base is not None and at.ours.mode == at.base.mode
    return Side(at.theirs.mode if changed else at.ours.mode, blob)

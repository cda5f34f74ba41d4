"""Versions of the stacks: as they are on disk, in a revision of this project, or under a release number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from vllm_stack.errors import UsageError
from vllm_stack.git import Git
from vllm_stack.patch import Patch
from vllm_stack.pins import parse_pin
from vllm_stack.series import parse_series
from vllm_stack.stack import SERIES_FILE, Stack
from vllm_stack.version import is_ours, wheel_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_stack.workspace import Workspace

#: Names of the stacks as they are on disk.
ON_DISK = (".", "worktree")


@dataclass(frozen=True)
class StackVersion:
    """A target's stack at some time."""

    wanted: str
    """What a user called it."""
    commit: str | None
    """The commit of this project that has it; None for what is on disk."""
    stack: Stack

    @property
    def version(self) -> str:
        """The version of its wheels."""
        stack = self.stack
        return str(wheel_version(stack.stack_id, stack.pin.release, stack.releases))


@dataclass(frozen=True)
class ProjectHistory:
    """The git repository of this project; the stacks may lie in a folder of it."""

    workspace: Workspace
    git: Git
    prefix: str

    @classmethod
    def find(cls, workspace: Workspace) -> ProjectHistory:
        """Return the repository that the workspace is in. UsageError when it is in none."""
        # The only place where git may look for a repository: this is the user's own, wherever it begins.
        found = Git(None).run(
            "rev-parse", "--absolute-git-dir", "--show-prefix", cwd=workspace.root, check=False
        )
        if found.returncode:
            raise UsageError(
                f"{workspace.root} is not in a git repository, so that it has no earlier versions",
                hint="`.` names the stacks as they are on disk",
            )
        folder, _, prefix = found.text.partition("\n")
        return cls(workspace, Git(Path(folder)), prefix)

    def resolve(self, revision: str) -> str:
        """Return the commit that a revision names. UsageError when there is none."""
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        found = self.git.run(*words, check=False)
        if found.returncode:
            raise UsageError(
                f"this project has no revision {revision}",
                hint="name a git revision, a release such as 0.33.0+bw.1, or `.` for what is on disk",
            )
        return found.text

    def targets(self, commit: str) -> tuple[str, ...]:
        """Return the targets that have a pin in a commit, sorted."""
        folder = f"{self.prefix}upstream/"
        names = self.git.run("ls-tree", "-z", "--name-only", "--full-tree", commit, folder).fields
        found = (name.removeprefix(folder) for name in names)
        return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))

    def has_stack(self, commit: str, target: str) -> bool:
        """Say whether a commit has both the pin and the series of a target."""
        series = f"{self.prefix}patch-stack/{target}/{SERIES_FILE}"
        return target in self.targets(commit) and self.git.exists(f"{commit}:{series}")

    def stack(self, commit: str, target: str) -> Stack:
        """Return a target's stack in a commit. UsageError when it is not valid there."""
        directory = f"{self.prefix}patch-stack/{target}/"
        pin, series_file = f"{self.prefix}upstream/{target}.toml", f"{directory}{SERIES_FILE}"
        series = parse_series(self._text(commit, series_file), source=f"{commit[:12]}:{series_file}")
        patches = tuple(
            Patch(entry.file, self._read(commit, f"{directory}{entry.file}")) for entry in series.patches
        )
        return Stack(
            target,
            self.workspace.stack_directory(target),
            parse_pin(self._text(commit, pin), source=f"{commit[:12]}:{pin}"),
            series,
            patches,
        )

    def _read(self, commit: str, path: str) -> bytes:
        found = self.git.run("cat-file", "blob", f"{commit}:{path}", check=False)
        if found.returncode:
            raise UsageError(f"commit {commit[:12]} has no file {path}")
        return found.stdout

    def _text(self, commit: str, path: str) -> str:
        try:
            return self._read(commit, path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{commit[:12]}:{path}: not UTF-8: {error}") from error

    def changes(self, target: str) -> Iterator[str]:
        """Yield the commits that changed a target's pin or stack, newest first."""
        paths = (f"{self.prefix}upstream/{target}.toml", f"{self.prefix}patch-stack/{target}")
        named = (f":(top,literal){path}" for path in paths)
        yield from self.git.run("rev-list", "--full-history", "HEAD", "--", *named).lines


def stack_versions(workspace: Workspace, wanted: str, targets: tuple[str, ...]) -> dict[str, StackVersion]:
    """Return the stacks that ``wanted`` names, by target; of ``targets`` alone, if there are any.

    A release (``0.33.0+bw.1``, or with the digits of a stack id) is of the one target that has it. Raises
    UsageError for what does not exist.
    """
    release = _release(wanted)
    if wanted in ON_DISK:
        names = [name for name in workspace.targets() if not targets or name in targets]
        return {name: StackVersion(wanted, None, Stack.load(workspace, name)) for name in names}
    history = ProjectHistory.find(workspace)
    if release is not None:
        return _released(history, release, targets or workspace.targets())
    commit = history.resolve(wanted)
    names = [name for name in history.targets(commit) if not targets or name in targets]
    return {name: StackVersion(wanted, commit, history.stack(commit, name)) for name in names}


def _release(wanted: str) -> Version | None:
    try:
        version = Version(wanted)
    except InvalidVersion:
        return None
    return version if is_ours(version) else None


def _released(history: ProjectHistory, release: Version, targets: tuple[str, ...]) -> dict[str, StackVersion]:
    found: dict[str, StackVersion] = {}
    for target in targets:
        version = _find_release(history, release, target)
        if version is not None:
            found[target] = version
    if not found:
        raise UsageError(
            f"no commit has the stack of {release}",
            details=[f"searched: every commit that changed {', '.join(targets)}"],
            hint="`release` gives a stack its number; commit it with the stack",
        )
    return found


def _find_release(history: ProjectHistory, release: Version, target: str) -> StackVersion | None:
    """Return the newest commit whose stack has the version ``release``, or what is on disk if that has it.

    A number is looked up in the series on disk, which keeps the releases of all times.
    """
    present = Stack.load(history.workspace, target)
    ids = {f"{item.upstream}+bw.{item.number}": item.stack_id for item in present.releases}
    wanted = ids.get(str(release))
    if _is(present, release, wanted):
        return StackVersion(str(release), None, present)
    for commit in history.changes(target):
        if not history.has_stack(commit, target):
            continue
        stack = history.stack(commit, target)
        if _is(stack, release, wanted):
            return StackVersion(str(release), commit, stack)
    return None


def _is(stack: Stack, release: Version, stack_id: str | None) -> bool:
    if stack_id is not None:
        return stack.stack_id == stack_id
    return str(wheel_version(stack.stack_id, stack.pin.release, stack.releases)) == str(release)

"""Applying patches to commits without a working tree: strictly first, three-way second.

A patch goes through an index of its own, so that nothing is checked out and a failure leaves nothing
behind. Committer and dates are fixed by the patch, so that the same base gives the same commit ids.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from vllm_stack.errors import ConflictError
from vllm_stack.git import Git, GitError
from vllm_stack.scratchindex import scratch_index

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from vllm_stack.base import Base
    from vllm_stack.git import GitResult
    from vllm_stack.patch import Patch
    from vllm_stack.scratchindex import ScratchIndex
    from vllm_stack.stack import Stack


#: What git says when it could not do its work, and not of a diff that does not apply or is none.
_GAVE_UP = re.compile(rb"^(?:fatal: |error: unable to (?:create|write) )", re.MULTILINE)


class Outcome(StrEnum):
    """What became of one patch."""

    STRICT = "strict"
    """Applied where its line numbers say, every context line equal."""
    OFFSET = "offset"
    """Applied with equal context, but at other line numbers."""
    THREE_WAY = "three-way"
    """Applied by merging with the blobs that it was made from."""
    ABSORBED = "absorbed"
    """Applied, and the tree is what it was: the change is there already."""
    CONFLICT = "conflict"
    MALFORMED = "malformed"

    @property
    def applied(self) -> bool:
        """Whether a commit was made."""
        return self in (Outcome.STRICT, Outcome.OFFSET, Outcome.THREE_WAY)


@dataclass(frozen=True)
class AppliedPatch:
    """What became of one patch; ``commit`` is None unless one was made."""

    name: str
    outcome: Outcome
    commit: str | None
    paths: tuple[str, ...]
    messages: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Change:
    """The net change of one path over a whole stack, with the patches that touch it."""

    path: str
    """As git has it; bytes that are not UTF-8 stand as lone surrogates."""
    status: Literal["A", "M", "D", "T"]
    """Added, modified, deleted, or made another type of thing (file, symbolic link, submodule)."""
    patches: tuple[str, ...]
    old_mode: str
    """git's mode before the stack, e.g. 100644; 000000 where there was nothing."""
    mode: str
    """The same after the stack."""


@dataclass(frozen=True)
class AppliedStack:
    """A stack that applied completely."""

    git: Git
    base_commit: str
    patches: tuple[AppliedPatch, ...]

    @property
    def head(self) -> str:
        """The commit of the last patch (the base for an empty stack)."""
        commits = [patch.commit for patch in self.patches if patch.commit]
        return commits[-1] if commits else self.base_commit

    def changes(self) -> tuple[Change, ...]:
        """Return what the stack changes between its base and its end, sorted by path."""
        fields = self.git.run(
            "diff-tree", "-r", "-z", "--no-renames", "--raw", self.base_commit, self.head
        ).fields
        return tuple(
            self._change(raw.removeprefix(":"), path)
            for raw, path in zip(fields[::2], fields[1::2], strict=True)
        )

    def _change(self, raw: str, path: str) -> Change:
        """Return one change; ``raw`` is what git puts before a path: both modes, both ids, the status."""
        old_mode, mode, _, _, status = raw.split()
        kind = cast("Literal['A', 'M', 'D', 'T']", status)
        # Patches show bytes that are not UTF-8 as U+FFFD.
        shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return Change(path, kind, self._touching(shown), old_mode, mode)

    def _touching(self, path: str) -> tuple[str, ...]:
        return tuple(patch.name for patch in self.patches if path in patch.paths)

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of files as they are after the last patch."""
        return self.git.blobs(self.head, paths)


@dataclass(frozen=True)
class Mail:
    """A patch file taken apart by git."""

    author: str
    email: str
    date: str
    message: bytes
    diff: bytes


@lru_cache(maxsize=128)
def take_apart(data: bytes) -> Mail:
    """Split a patch file into author, message and diff as ``git am`` does."""
    with tempfile.TemporaryDirectory(prefix="vllm-stack-") as name:
        folder = Path(name)
        # -b keeps "[Attention]" at the front of the subject; without it git takes it for "[PATCH]".
        words = ("mailinfo", "-b", "--encoding=UTF-8", "--no-scissors", folder / "message", folder / "diff")
        said = Git(None).run(*words, stdin=data, cwd=folder).stdout.decode("utf-8")
        body, diff = ((folder / part).read_bytes() for part in ("message", "diff"))
    values = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    subject, body = values.get("Subject", "").encode(), body.strip(b"\n")
    message = subject + (b"\n\n" + body if body else b"") + b"\n"
    return Mail(values.get("Author", ""), values.get("Email", ""), values.get("Date", ""), message, diff)


def structural_faults(patch: Patch) -> tuple[str, ...]:
    """Return what keeps git from reading the patch as it is meant."""
    return tuple(problem.message for problem in patch.problems if problem.code != "trailing-whitespace")


def apply_patch(git: Git, parent: str, patch: Patch) -> AppliedPatch:
    """Apply one patch on top of the commit ``parent`` and say what became of it."""
    faults = structural_faults(patch)
    if faults:
        return AppliedPatch(patch.name, Outcome.MALFORMED, None, patch.paths, faults)
    mail = take_apart(patch.data)
    with scratch_index(git, parent) as index:
        outcome, messages = _apply_to_index(mail.diff, index)
        if not outcome.applied:
            return AppliedPatch(patch.name, outcome, None, patch.paths, messages)
        tree = index.write()
    if tree == git.tree(parent):
        return AppliedPatch(patch.name, Outcome.ABSORBED, None, patch.paths)
    return AppliedPatch(patch.name, outcome, commit_mail(git, parent, tree, mail), patch.paths, messages)


def _apply_to_index(diff: bytes, index: ScratchIndex) -> tuple[Outcome, tuple[str, ...]]:
    outcome, said = apply_strictly(diff, index)
    if outcome.applied:
        return outcome, moved_hunks(said)
    merged = index.run("apply", "--cached", "--3way", "-", stdin=diff, check=False)
    _require_finished(merged)
    if merged.returncode == 0:
        return Outcome.THREE_WAY, ()
    return Outcome.CONFLICT, refusals(said)


def apply_strictly(diff: bytes, index: ScratchIndex) -> tuple[Outcome, tuple[str, ...]]:
    """Apply a diff to an index without fuzz; return what came of it and all that git said about it.

    The index is as it was when the diff does not apply. GitError when git could not tell.
    """
    done = index.apply(diff)
    _require_finished(done)
    said = tuple(done.stderr.decode("utf-8", "replace").splitlines())
    if done.returncode:
        return Outcome.CONFLICT, said
    return (Outcome.OFFSET if moved_hunks(said) else Outcome.STRICT), said


def _require_finished(done: GitResult) -> None:
    """Raise GitError when git was killed, or could not write: that says nothing about the diff."""
    if done.returncode < 0 or (done.returncode and _GAVE_UP.search(done.stderr)):
        raise GitError(done)


def moved_hunks(said: Sequence[str]) -> tuple[str, ...]:
    """Return git's lines about hunks that applied at other line numbers."""
    return tuple(line for line in said if "(offset " in line)


def refusals(said: Sequence[str]) -> tuple[str, ...]:
    """Return git's lines about why a diff does not apply."""
    return tuple(line for line in said if line.startswith("error: "))


def commit_patch(git: Git, parent: str, tree: str, patch: Patch, *, message: str | None = None) -> str:
    """Commit ``tree`` on top of ``parent`` as what ``patch`` gives; return the commit.

    ``message`` stands in for the patch's own.
    """
    mail = take_apart(patch.data)
    if message is not None:
        mail = replace(mail, message=message.encode())
    return commit_mail(git, parent, tree, mail)


def commit_mail(git: Git, parent: str, tree: str, mail: Mail) -> str:
    """Commit ``tree`` on top of ``parent`` with a patch's author, date and message; return the commit."""
    author = {
        "GIT_AUTHOR_NAME": mail.author,
        "GIT_AUTHOR_EMAIL": mail.email,
        "GIT_AUTHOR_DATE": mail.date,
        "GIT_COMMITTER_DATE": mail.date,
    }
    return git.run("commit-tree", tree, "-p", parent, "-F", "-", stdin=mail.message, env=author).text


def try_stack(git: Git, base_commit: str, patches: Sequence[Patch]) -> tuple[AppliedPatch, ...]:
    """Apply the patches in order; after one that fails the rest is tried on the tree without it."""
    return tuple(try_each(git, base_commit, patches))


def try_each(git: Git, base_commit: str, patches: Iterable[Patch]) -> Generator[AppliedPatch]:
    """Do the same one patch at a time."""
    head = base_commit
    with git.opened() as opened:
        for patch in patches:
            result = apply_patch(opened, head, patch)
            yield result
            head = result.commit or head


def apply_stack(base: Base, stack: Stack) -> AppliedStack:
    """Apply a stack to its own base, where every patch has to apply strictly.

    Raises ConflictError that says what became of every patch when one does not.
    """
    results = try_stack(base.git, base.commit, stack.patches)
    failed = [result for result in results if result.outcome is not Outcome.STRICT]
    if failed:
        raise ConflictError(
            f"{len(failed)} of {len(results)} patches of {stack.target} do not apply to "
            f"{stack.pin.release} as they stand",
            details=[line for result in results for line in describe(result)],
            hint=advice(stack.target, results),
        )
    return AppliedStack(base.git, base.commit, results)


def advice(target: str, results: Sequence[AppliedPatch]) -> str:
    """Say what to do about a stack that does not apply strictly."""
    absorbed = [f"--drop {result.name}" for result in results if result.outcome is Outcome.ABSORBED]
    if absorbed:
        return (
            "the change of an absorbed patch is there already: "
            f"`apply --target {target} --three-way {' '.join(absorbed)}` leaves it out, "
            "`refresh` with the same --target and --drop takes it off the stack"
        )
    return (
        f"never edit patch files by hand: `apply --target {target} --three-way`, then `refresh`, "
        "writes them anew"
    )


def describe(result: AppliedPatch) -> list[str]:
    """Return the lines that tell a person what became of a patch."""
    return [f"{result.name}: {result.outcome}", *(f"    {message}" for message in result.messages)]

"""Which patch breaks a test: bisection over trees, some of which may not be testable."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_stack.applying import commit_patch
from vllm_stack.carrying import carry
from vllm_stack.testtree import open_tree
from vllm_stack.trial import Trial, make_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vllm_stack.applying import AppliedStack
    from vllm_stack.git import Git
    from vllm_stack.series import SeriesEntry
    from vllm_stack.stack import Stack
    from vllm_stack.trial import Runner

Verdict = Literal["passes", "broken-by", "fails-alone", "undecided"]
"""``passes``: at the end of the stack. ``fails-alone``: with no other patch it fails too. ``undecided``: it
fails in every tree that the patch applies to, of which none is without other patches."""


@dataclass(frozen=True)
class Bisection:
    """What was found out about the test of one patch."""

    patch: str
    command: str
    verdict: Verdict
    culprits: tuple[str, ...]
    """The patch that breaks the test; several when the trees between could not be tested."""
    before: bool
    """Whether the culprits come before the patch in the stack, and break it from there."""
    trials: tuple[Trial, ...]
    untestable: tuple[str, ...]
    """Trees that do not have the test, or on which its patch does not apply, by their last patch."""


def first_bad(count: int, judge: Callable[[int], bool | None]) -> tuple[int, int]:
    """Return the last good and the first bad of ``count`` states, of which 0 is good and the last is bad.

    ``judge`` says of a state whether it is good, or None when that cannot be told; between the two returned
    there are only such states.
    """
    good, bad = 0, count - 1
    known: set[int] = set()
    while True:
        middle = (good + bad) / 2
        left = [state for state in range(good + 1, bad) if state not in known]
        if not left:
            return good, bad
        state = min(left, key=lambda item: abs(item - middle))
        known.add(state)
        verdict = judge(state)
        if verdict is not None:
            good, bad = (state, bad) if verdict else (good, state)


@dataclass(frozen=True)
class Bench:
    """Runs the tests of a stack's patches in trees of its commits."""

    git: Git
    """A workbench that has the base."""
    stack: Stack
    applied: AppliedStack
    runner: Runner
    official: Path | None
    note: Callable[[str], None]

    @property
    def names(self) -> list[str]:
        """The patches, in order."""
        return [patch.name for patch in self.stack.patches]

    def entry(self, name: str) -> SeriesEntry:
        """Return what the series says of a patch."""
        return next(entry for entry in self.stack.series.patches if entry.file == name)

    def commits(self) -> list[str]:
        """Return the base and the commit of each patch: number n has the first n patches."""
        return [self.applied.base_commit, *(str(patch.commit) for patch in self.applied.patches)]

    def run(self, patch: str, tree: str, commit: str) -> Trial:
        """Run the test of ``patch`` in the tree of ``commit``, which stands after the patch ``tree``."""
        command = self.entry(patch).test
        self.note(f"{patch}: {command}" + (f" (after {tree})" if tree != patch else ""))
        with open_tree(self.git, commit, self.official) as place:
            done = self.runner.run(command, place.folder, place.scratch)
        trial = make_trial(patch, tree, command, done)
        self.note(f"{patch}: {trial.outcome} after {trial.seconds:.1f} s")
        return trial

    def run_own(self, patch: str) -> Trial:
        """Run the test of a patch in the tree after it."""
        return self.run(patch, patch, self.commits()[self.names.index(patch) + 1])

    def bisect(self, patch: str) -> Bisection:
        """Find out whether a patch's test passes at the end of the stack, and what breaks it if not."""
        return _Search(self, patch).result()


class _Search:
    """The search for what breaks the test of one patch."""

    def __init__(self, bench: Bench, patch: str) -> None:
        self._bench = bench
        self._patch = patch
        self._at = bench.names.index(patch) + 1
        self._commits = bench.commits()
        self._trials: list[Trial] = []
        self._untestable: list[str] = []

    def result(self) -> Bisection:
        """Search."""
        last = len(self._commits) - 1
        if self._passes(last, self._commits[last]):
            return self._found("passes", (), before=False)
        own = last != self._at and self._passes(self._at, self._commits[self._at])
        return self._later() if own else self._earlier()

    def _tree(self, number: int) -> str:
        return self._bench.names[number - 1] if number else "(base)"

    def _passes(self, number: int, commit: str) -> bool:
        trial = self._bench.run(self._patch, self._tree(number), commit)
        self._trials.append(trial)
        return trial.passed

    def _found(self, verdict: Verdict, culprits: Sequence[str], *, before: bool) -> Bisection:
        command = self._bench.entry(self._patch).test
        trials, untestable = tuple(self._trials), tuple(self._untestable)
        return Bisection(self._patch, command, verdict, tuple(culprits), before, trials, untestable)

    def _later(self) -> Bisection:
        """Search the patches after the one whose test it is: with none of them it passes, with all not."""
        needed = self._needed()

        def judge(state: int) -> bool | None:
            number = self._at + state
            if not all(self._bench.git.exists(f"{self._commits[number]}:{path}") for path in needed):
                self._untestable.append(self._tree(number))
                return None
            return self._passes(number, self._commits[number])

        good, bad = first_bad(len(self._commits) - self._at, judge)
        culprits = self._bench.names[self._at + good : self._at + bad]
        return self._found("broken-by", culprits, before=False)

    def _needed(self) -> list[str]:
        """Return the files that the command names and that the tree after the patch has."""
        words = _words(self._bench.entry(self._patch).test)
        paths = {word.partition("::")[0] for word in words if not word.startswith(("-", "/"))}
        commit = self._commits[self._at]
        return sorted(path for path in paths if path and self._bench.git.exists(f"{commit}:{path}"))

    def _earlier(self) -> Bisection:
        """Search the patches before: put the patch on each beginning of the stack, shortest first."""
        onto = {number: self._carried(number) for number in range(self._at)}
        usable = [number for number, commit in onto.items() if commit]
        self._untestable += [self._tree(number) for number, commit in onto.items() if commit is None]
        shortest = usable[0]
        if shortest == self._at - 1 or not self._passes(shortest, str(onto[shortest])):
            return self._found("undecided" if shortest else "fails-alone", (), before=True)

        def judge(state: int) -> bool | None:
            commit = onto[shortest + state]
            return None if commit is None else self._passes(shortest + state, commit)

        good, bad = first_bad(self._at - shortest, judge)
        culprits = self._bench.names[shortest + good : shortest + bad]
        return self._found("broken-by", culprits, before=True)

    def _carried(self, number: int) -> str | None:
        """Return the patch on top of the first ``number`` others, or None when it does not apply there."""
        bench, at = self._bench, self._at
        if number == at - 1:
            return self._commits[at]
        patch = bench.stack.patches[at - 1]
        before, after = self._commits[at - 1], self._commits[at]
        attempt = carry(bench.git, patch, before, after, self._commits[number])
        if attempt.tree is None or not attempt.outcome.applied:
            return None
        return commit_patch(bench.git, self._commits[number], attempt.tree, patch)


def _words(command: str) -> list[str]:
    """Split a command as a shell does, or roughly where it has quotes that do not match."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()

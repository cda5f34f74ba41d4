"""What ``rebase-upstream`` did, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from vllm_stack.conflictview import printable, render_conflicts
from vllm_stack.contracts.view import render_contracts
from vllm_stack.errors import ConflictError, StackError
from vllm_stack.rebase import Outcome, Status
from vllm_stack.replay import ReplayedPatch, Ruling, Verdict
from vllm_stack.report import Report
from vllm_stack.thirdparty import render_third_party

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.acceptance import Journal
    from vllm_stack.thirdparty import ThirdPartyReport

_STYLES = {
    Verdict.CLEAN: "green",
    Verdict.THREE_WAY: "green",
    Verdict.ABSORBED: "yellow",
    Verdict.CONFLICT: "bold red",
    Verdict.CONTRACT_BROKEN: "bold red",
    Verdict.MALFORMED: "bold red",
}
_WIDTH = max(len(verdict) for verdict in Verdict)


@dataclass(frozen=True)
class ChangedFile:
    """A file of the project that accepting a rebase changed."""

    path: str
    action: str


@dataclass(frozen=True)
class RebaseReport(Report):
    """What became of each patch, and how the rebase stands."""

    command: ClassVar[str] = "rebase-upstream"
    target: str
    status: Status
    old_release: str
    new_release: str
    notes: tuple[str, ...]
    patches: tuple[ReplayedPatch, ...]
    waits_at: str | None
    """The patch that the rebase stopped at."""
    tree: str | None
    """Where its files wait."""
    changed: tuple[ChangedFile, ...]
    third_party: ThirdPartyReport | None
    """What the releases pin of others; None where a command did not look at both."""

    @classmethod
    def of(cls, outcome: Outcome, third_party: ThirdPartyReport | None = None) -> RebaseReport:
        """Make the report of what a command did."""
        session = outcome.session
        stop = session.state.stop if session else None
        return cls(
            outcome.target,
            outcome.status,
            outcome.old,
            outcome.new,
            outcome.notes,
            outcome.replay.patches if outcome.replay else (),
            stop.patch if stop else None,
            str(session.tree.work_tree) if session and stop and stop.conflict else None,
            _changed(outcome.journal),
            third_party,
        )

    @property
    def troubled(self) -> tuple[ReplayedPatch, ...]:
        """The patches that somebody has to look at."""
        return tuple(patch for patch in self.patches if patch.needs_somebody)

    def failure(self) -> StackError | None:
        """A patch that somebody has to look at is one."""
        if self.status is Status.STOPPED and self.waits_at:
            patch = next(patch for patch in self.patches if patch.name == self.waits_at)
            message = f"the rebase waits at {patch.name}: {patch.verdict}"
            return ConflictError(message, hint=self._advice(patch))
        if not self.troubled:
            return None
        return ConflictError(
            f"{len(self.troubled)} of {len(self.patches)} patches need somebody on {self.new_release}",
            details=[f"{patch.name}: {patch.verdict}" for patch in self.troubled],
            hint=f"`rebase-upstream {self.new_release} --target {self.target}` stops at each of them",
        )

    def _advice(self, patch: ReplayedPatch) -> str:
        skip = f"`--skip {patch.name} --reason TEXT` takes it off the stack"
        ways = {
            Verdict.ABSORBED: f"`--accept-absorbed {patch.name}` takes it off the stack{self._otherwise}",
            Verdict.MALFORMED: f"--abort and mend it with `apply` and `refresh`, or {skip}",
            Verdict.CONFLICT: f"edit the files in {self.tree}, then --continue; {skip}",
            Verdict.CONTRACT_BROKEN: (
                f"amend the patch in {self.tree}, then --continue; if the contract is wrong, "
                f"`--accept-contracts {patch.name} --reason TEXT` keeps the patch; {skip}"
            ),
        }
        return ways.get(patch.verdict, skip)

    @property
    def _otherwise(self) -> str:
        """What to do about a patch that only seems to be absorbed."""
        return (
            f"; if upstream does not do what it does, edit the files in {self.tree}, then --continue"
            if self.tree
            else ""
        )

    def render(self, console: Console) -> None:
        """Print a line for each patch, then all that is to be said about those that need somebody."""
        title = f"{self.target} {self.old_release} -> {self.new_release}: {self.status}"
        console.print(title, style="bold", markup=False)
        for note in self.notes:
            console.print(f"  note: {note}", markup=False)
        for patch in self.patches:
            _render_line(console, patch)
        shown = [patch for patch in self.troubled if self.waits_at in (None, patch.name)]
        for patch in shown:
            if patch.conflicts or patch.contracts:
                console.print()
            render_conflicts(console, patch.conflicts)
            render_contracts(console, patch.name, patch.contracts)
        for file in self.changed:
            console.print(f"  {file.action}: {file.path}", markup=False)
        if self.third_party and self.status is not Status.STOPPED:
            render_third_party(console, self.third_party)


def _render_line(console: Console, patch: ReplayedPatch) -> None:
    how = "" if patch.outcome in (patch.verdict, "strict") else f" ({patch.outcome})"
    line = Text.assemble(("  "), (f"{patch.verdict:{_WIDTH}}", _STYLES[patch.verdict]), f" {patch.name}{how}")
    if patch.resolution:
        line.append(f" resolved as recorded {patch.resolution[:12]}", "cyan")
    if patch.ruling:
        line.append(f" {_RULED[patch.ruling]}: {printable(patch.reason or '')}", "yellow")
    console.print(line)
    if patch.needs_somebody or patch.verdict is Verdict.THREE_WAY:
        for message in patch.messages:
            console.print(Text(f"  {'':{_WIDTH}} {printable(message)}", "dim"))


_RULED = {
    Ruling.SKIPPED: "taken off the stack",
    Ruling.ABSORBED: "taken off the stack",
    Ruling.CONTRACTS: "kept all the same",
}


def _changed(journal: Journal | None) -> tuple[ChangedFile, ...]:
    if journal is None:
        return ()
    return tuple(
        ChangedFile(
            file.path,
            "removed" if file.after is None else "added" if file.before is None else "changed",
        )
        for file in journal.files
    )

"""Moving a stack to another release: start, stop where a person is needed, go on, accept, or abort."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm_stack.acceptance import Journal
from vllm_stack.accepting import plan_acceptance
from vllm_stack.applying import commit_patch
from vllm_stack.base import Base
from vllm_stack.checkout import Checkout
from vllm_stack.checkoutmove import move_back, move_forward, require_in_step, require_no_loss
from vllm_stack.conflicttree import Harvest, Stop, stop_at
from vllm_stack.errors import LintError, UsageError, WorkInProgressError
from vllm_stack.export import export_commit
from vllm_stack.hashing import sha256_file
from vllm_stack.lint import lint_patch
from vllm_stack.patch import Patch
from vllm_stack.projectgit import uncommitted
from vllm_stack.replay import Replay, Settled, Verdict, replay
from vllm_stack.resolutions import FOLDER, Pair, Resolution, Resolutions
from vllm_stack.session import BasePlace, Phase, Session, State, clear_leftovers, only_one
from vllm_stack.sources import base_of
from vllm_stack.stack import SERIES_FILE, Stack
from vllm_stack.tomlfile import read_toml_text
from vllm_stack.workbench import open_workbench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_stack.gitsource import History
    from vllm_stack.releases import Candidate
    from vllm_stack.workspace import Workspace


class Status(StrEnum):
    """How a command left a rebase."""

    DRY_RUN = "dry-run"
    STOPPED = "stopped"
    ACCEPTED = "accepted"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Orders:
    """What a person says about patches, each with a reason: they leave, or stay, as they say."""

    skip: Mapping[str, str] = field(default_factory=dict)
    absorbed: Mapping[str, str] = field(default_factory=dict)
    contracts: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The patches that they are about."""
        return (*self.skip, *self.absorbed, *self.contracts)


@dataclass(frozen=True)
class Outcome:
    """What a command made of a rebase."""

    status: Status
    target: str
    old: str
    new: str
    notes: tuple[str, ...] = ()
    replay: Replay | None = None
    stack: Stack | None = None
    session: Session | None = None
    """The rebase that waits."""
    journal: Journal | None = None
    """What was changed when it was accepted."""


@dataclass(frozen=True)
class Rebase:
    """The rebases of one target."""

    workspace: Workspace
    target: str
    history: History | None = None

    # -- without changing anything

    def dry_run(self, candidate: Candidate, orders: Orders) -> Outcome:
        """Say what would become of each patch."""
        stack = Stack.load(self.workspace, self.target)
        _require_known(stack, orders)
        pair = Pair(stack.pin.release, candidate.release)
        resolutions = Resolutions(pair, (stack.directory / FOLDER,))
        old = base_of(self.workspace, stack.pin, offline=True)
        state = self._state(stack, candidate, old, orders, "")
        with open_workbench(old, candidate.base) as git:
            done = replay(
                git,
                stack,
                old.commit,
                candidate.base.commit,
                history=self.history,
                resolutions=resolutions,
                rulings=state.rulings,
            )
        notes = (*candidate.notes, *candidate.lacks)
        return Outcome(Status.DRY_RUN, self.target, pair.old, pair.new, notes, replay=done, stack=stack)

    # -- the rebase itself

    def start(self, candidate: Candidate, orders: Orders, wanted: str) -> Outcome:
        """Begin a rebase to ``candidate`` and go on until it is accepted or somebody is needed.

        WorkInProgressError while one is open, or when work would be lost; the list says what.
        """
        with only_one(self.workspace, self.target):
            self.require_none_open()
            stack = Stack.load(self.workspace, self.target)
            _require_known(stack, orders)
            self.require_clean()
            if candidate.release == stack.pin.release:
                raise UsageError(f"the stack of {self.target} is on {candidate.release} already")
            candidate.require_complete()
            old = base_of(self.workspace, stack.pin, offline=True)
            state = self._state(stack, candidate, old, orders, wanted)
            series = read_toml_text(stack.directory / SERIES_FILE)
            session = Session.create(self.workspace, stack, candidate, state, series)
            return self._advance(session)

    def require_none_open(self) -> None:
        """WorkInProgressError while a rebase is open."""
        session = Session.find(self.workspace, self.target)
        if session is not None:
            raise WorkInProgressError(
                f"a rebase of {self.target} from {session.state.old} to {session.state.new} is open",
                details=[f"it waits at {session.state.stop.patch}"] if session.state.stop else [],
                hint="finish it with --continue, or take it back with --abort",
            )

    def go_on(self, orders: Orders) -> Outcome:
        """Take what a person made of the patch that the rebase stopped at, and go on."""
        with only_one(self.workspace, self.target):
            session = self._open_session()
            if session.state.phase is Phase.ABORTING:
                raise WorkInProgressError(
                    "this rebase was being taken back when it was interrupted", hint="run --abort again"
                )
            if session.state.phase is Phase.ACCEPTING:
                return self._finish(session, Journal.read(session.folder))
            return self._advance(self._decided(session, orders))

    def abort(self) -> Outcome:
        """Put everything back to what it was before the rebase began."""
        with only_one(self.workspace, self.target):
            session = self._open_session()
            state = session.state
            if state.phase is not Phase.OPEN:
                journal = Journal.read(session.folder)
                checkout = Checkout.find(self.workspace.checkout(self.target))
                # What is refused is refused before anything is taken back: --continue can still finish.
                journal.require_known(self.workspace.root)
                if journal.checkout and checkout:
                    require_no_loss(checkout, journal.checkout.before)
                session = session.record(phase=Phase.ABORTING)
                if journal.checkout and checkout:
                    move_back(checkout, journal.checkout.before)
                journal.undo(self.workspace.root, session.folder)
            session.remove()
            return Outcome(Status.ABORTED, self.target, state.old, state.new)

    def _open_session(self) -> Session:
        session = Session.find(self.workspace, self.target)
        if session is None:
            clear_leftovers(self.workspace, self.target)
            raise UsageError(f"no rebase of {self.target} is open", hint="start one: rebase-upstream VERSION")
        return session

    def require_clean(self) -> None:
        """WorkInProgressError, with a list, when there is work that no patch file or no commit has."""
        self._require_in_step()
        dirty = uncommitted(self.workspace.root, ("patch-stack", "upstream/*.toml"))
        if dirty:
            raise WorkInProgressError(
                "there are uncommitted changes of pins or patches",
                details=dirty,
                hint="commit or stash them, so that the rebase can be told from them",
            )

    def _require_in_step(self) -> None:
        """WorkInProgressError, with a list, when the checkout holds what no patch file has."""
        checkout = Checkout.find(self.workspace.checkout(self.target))
        if checkout is not None:
            if checkout.state.pending is not None:
                raise WorkInProgressError(
                    f"an `apply` to {checkout.folder} was interrupted", hint="run `apply` again to finish it"
                )
            require_in_step(checkout)

    def _state(self, stack: Stack, candidate: Candidate, old: Base, orders: Orders, wanted: str) -> State:
        return State(
            self.target,
            wanted,
            stack.pin.release,
            candidate.release,
            stack.stack_id,
            BasePlace.of(old),
            BasePlace.of(candidate.base),
            self._files(stack),
            skipped=dict(orders.skip),
            absorbed=dict(orders.absorbed),
            contracts=dict(orders.contracts),
            notes=candidate.notes,
        )

    def _files(self, stack: Stack) -> dict[str, str]:
        """Return the sha256 of the files that the rebase began with and whose text it goes on from."""
        files = (self.workspace.pin_file(self.target), stack.directory / SERIES_FILE)
        return {str(path.relative_to(self.workspace.root)): sha256_file(path) for path in files}

    def _decided(self, session: Session, orders: Orders) -> Session:
        """Write down what a person decided about the patch that the rebase stopped at."""
        state = session.state
        stop = state.stop
        if stop is None or not state.prepared or not session.tree.is_there(stop):
            # Interrupted on the way to a stop: nobody has been asked anything yet.
            if orders.names:
                raise UsageError(
                    "the rebase has not stopped at a patch yet", hint="run --continue alone first"
                )
            return session
        if orders.names:
            if set(orders.names) != {stop.patch}:
                raise UsageError(
                    f"the rebase waits at {stop.patch}, and only about that one can be decided now"
                )
            _require_fitting(stop, orders)
            return session.record(
                skipped={**state.skipped, **orders.skip},
                absorbed={**state.absorbed, **orders.absorbed},
                contracts={**state.contracts, **orders.contracts},
                stop=None,
                prepared=False,
            )
        if not stop.conflict:
            return session  # malformed, or surely absorbed: replaying says so again
        session.tree.create(*self._bases(session))
        made = session.tree.harvest(stop)
        if made.message is not None:
            self._require_proper_message(session, stop, made)
        if stop.open or made.diff:
            session.add_resolution(Resolution(stop.conflict, stop.patch, state.pair, made.diff))
        messages = state.messages if made.message is None else {**state.messages, stop.patch: made.message}
        return session.record(messages=messages, stop=None, prepared=False)

    def _require_proper_message(self, session: Session, stop: Stop, made: Harvest) -> None:
        """Refuse a commit message that would not do for the patch. LintError."""
        stack = Stack.load(self.workspace, self.target)
        at = [patch.name for patch in stack.patches].index(stop.patch)
        store = session.tree.store
        commit = commit_patch(store, stop.before, made.tree, stack.patches[at], message=made.message)
        patch = Patch(stop.patch, export_commit(store, commit))
        findings = lint_patch(stack, patch, stack.series.patches[at])
        errors = [str(finding) for finding in findings if finding.is_error]
        if errors:
            raise LintError(
                f"the commit in {session.tree.work_tree} does not make a proper patch",
                details=errors,
                hint="amend it, and run --continue again; without a commit the patch keeps its message",
            )

    def _bases(self, session: Session) -> tuple[Base, Base]:
        """Return both bases, imported anew if the cache has lost them."""
        state = session.state
        stack = Stack.load(self.workspace, self.target)
        old = state.old_base.open() or base_of(self.workspace, stack.pin, offline=False)
        new = state.new_base.open() or base_of(self.workspace, session.pin, offline=False)
        for base, place in ((old, state.old_base), (new, state.new_base)):
            if base.commit != place.commit:
                raise WorkInProgressError(
                    "the cache has another import of a release than the one that the rebase began with",
                    hint="--abort, and start again",
                )
        return old, new

    def _advance(self, session: Session) -> Outcome:
        """Replay with all decisions made so far; stop at the first patch that needs somebody, or accept."""
        state = session.state
        stack = Stack.load(self.workspace, self.target)
        changed = [path for path, sha256 in self._files(stack).items() if state.files.get(path) != sha256]
        if changed or stack.stack_id != state.stack_id:
            raise WorkInProgressError(
                "the stack changed while the rebase was open",
                details=changed,
                hint="put it back with git, or --abort and start again",
            )
        old, new = self._bases(session)
        session.tree.create(old, new)
        with session.tree.store.opened() as git:
            done = replay(
                git,
                replace(stack, series=session.series(stack)),
                old.commit,
                new.commit,
                history=self.history,
                resolutions=session.resolutions(stack),
                rulings=state.rulings,
            )
            if done.troubled:
                session = self._stop(session, done)
                return Outcome(
                    Status.STOPPED, self.target, state.old, state.new, state.notes, done, stack, session
                )
            # It was at the start, but somebody may have worked in it while the rebase was open.
            self._require_in_step()
            journal = plan_acceptance(self.workspace, session, stack, done)
        journal.write(session.folder)
        session = session.record(phase=Phase.ACCEPTING)
        outcome = self._finish(session, journal)
        return replace(outcome, replay=done, stack=stack)

    def _stop(self, session: Session, done: Replay) -> Session:
        """Put the tree to the first patch that needs somebody."""
        at = next(number for number, patch in enumerate(done.patches) if patch.needs_somebody)
        settled = Settled(done.patches[at], done.places[at], done.attempts[at])
        state = session.state
        stop, stages = stop_at(settled, f"{self.target} {state.old}", f"{self.target} {state.new}")
        if state.prepared and state.stop == stop and session.tree.is_there(stop):
            return session  # the tree is there already, perhaps with work in it
        session = session.record(stop=stop, prepared=False)
        if stop.conflict:
            session.tree.prepare(stop, stages, settled.patch.full_message.encode())
        return session.record(prepared=True)

    def _finish(self, session: Session, journal: Journal) -> Outcome:
        """Carry the journal out and end the rebase. May be run again after an interruption."""
        state = session.state
        journal.carry_out(self.workspace.root, session.folder)
        checkout = Checkout.find(self.workspace.checkout(self.target))
        if journal.checkout and checkout:
            stack = Stack.load(self.workspace, self.target, within_rebase=True)
            base = Base(session.tree.store, state.new_base.commit)
            move_forward(checkout, base, journal.checkout.head, stack, journal.checkout.names)
        session.remove()
        return Outcome(Status.ACCEPTED, self.target, state.old, state.new, state.notes, journal=journal)


def _require_fitting(stop: Stop, orders: Orders) -> None:
    """Refuse a decision that is about another verdict, before it costs what was edited in the tree."""
    for names, option, verdict in (
        (orders.absorbed, "--accept-absorbed", Verdict.ABSORBED),
        (orders.contracts, "--accept-contracts", Verdict.CONTRACT_BROKEN),
    ):
        if names and stop.verdict != verdict:
            raise UsageError(
                f"{option} is for patches that are {verdict}; {stop.patch} is not: {stop.verdict}",
                hint="--continue takes what is in the tree",
            )


def _require_known(stack: Stack, orders: Orders) -> None:
    known = {patch.name for patch in stack.patches}
    for name in orders.names:
        if name not in known:
            raise UsageError(f"the stack of {stack.target} has no patch {name}")

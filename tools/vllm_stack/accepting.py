"""Working out what accepting a rebase changes, and seeing that it is what the replay gave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from vllm_stack.acceptance import CheckoutChange, Journal
from vllm_stack.applying import Outcome, try_stack
from vllm_stack.checkout import Checkout
from vllm_stack.checkoutmove import Snapshot
from vllm_stack.errors import BuildError, LintError
from vllm_stack.export import export_commit
from vllm_stack.lint import lint_stack
from vllm_stack.patch import Patch
from vllm_stack.replay import Ruling
from vllm_stack.resolutions import FOLDER, Resolution
from vllm_stack.series import Dropped, parse_series, with_dropped, with_patches
from vllm_stack.stack import SERIES_FILE, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_stack.git import Git
    from vllm_stack.replay import Replay, ReplayedPatch
    from vllm_stack.session import Session
    from vllm_stack.workspace import Workspace

_LEAVES = (Ruling.SKIPPED, Ruling.ABSORBED)


def plan_acceptance(workspace: Workspace, session: Session, stack: Stack, done: Replay) -> Journal:
    """Return the journal of a rebase whose patches are all decided.

    Raises LintError when the patches break a rule, BuildError when applying the new files would not give
    the trees of the replay; then nothing changed.
    """
    new, series = _stack_to_be(session, stack, done)
    errors = [str(finding) for finding in lint_stack(new, on_disk=False) if finding.is_error]
    if errors:
        raise LintError("the rebased patches break rules of `lint`; nothing was changed", details=errors)
    kept = [patch for patch in done.patches if patch.commit]
    _require_round_trip(done.git, done.new_base, new.patches, kept)
    root = workspace.root
    folder = stack.directory.relative_to(root)
    wanted: dict[str, bytes | None] = {
        str(workspace.pin_file(stack.target).relative_to(root)): session.pin_text.encode(),
        str(folder / SERIES_FILE): series.encode(),
        **{str(folder / patch.name): None for patch in stack.patches},
        **{str(folder / patch.name): patch.data for patch in new.patches},
        **{str(folder / FOLDER / path): data for path, data in _resolutions(session, done).items()},
    }
    return Journal.of(root, wanted, _checkout(workspace, stack.target, done, kept))


def _stack_to_be(session: Session, stack: Stack, done: Replay) -> tuple[Stack, str]:
    pairs = list(zip(stack.patches, done.patches, strict=True))
    patches = tuple(_exported(done.git, old, patch) for old, patch in pairs if patch.commit)
    leaving = [patch for patch in done.patches if patch.ruling in _LEAVES]
    kept = {patch.name for patch in patches}
    entries = [entry for entry in session.series(stack).patches if entry.file in kept]
    text = with_patches(session.series_text, entries, [patch.name for patch in leaving])
    text = with_dropped(text, [_dropped(patch, session.state.new) for patch in leaving])
    series = parse_series(text, source=SERIES_FILE)
    return replace(stack, pin=session.pin, series=series, patches=patches), text


def _dropped(patch: ReplayedPatch, release: str) -> Dropped:
    why: Literal["absorbed", "skipped"] = "absorbed" if patch.ruling is Ruling.ABSORBED else "skipped"
    return Dropped(file=patch.name, release=release, why=why, reason=patch.reason or "")


def _exported(git: Git, old: Patch, patch: ReplayedPatch) -> Patch:
    """Return the patch as a file; one in which only the date would differ stays as it is."""
    data = export_commit(git, str(patch.commit))
    return old if old.same_but_for_date(data) else Patch(old.name, data)


def _require_round_trip(
    git: Git, base: str, patches: Sequence[Patch], replayed: Sequence[ReplayedPatch]
) -> None:
    """See that the new files, applied strictly to the new release, give the trees of the replay."""
    for result, patch in zip(try_stack(git, base, patches), replayed, strict=True):
        same = result.commit is not None and git.tree(result.commit) == git.tree(str(patch.commit))
        if result.outcome is not Outcome.STRICT or not same:
            raise BuildError(
                f"{patch.name} does not survive as a patch file; nothing was changed",
                details=result.messages,
                hint="this should not happen: please report it with the patch",
            )


def _resolutions(session: Session, done: Replay) -> dict[str, bytes]:
    """Return this rebase's own resolutions that the replay used, by path."""
    found: dict[str, bytes] = {}
    for patch in done.patches:
        for conflict in patch.used:
            path = Resolution(conflict, patch.name, session.state.pair, b"").path
            own = session.folder / FOLDER / path
            if own.is_file():
                found[path] = own.read_bytes()
    return found


def _checkout(
    workspace: Workspace, target: str, done: Replay, kept: Sequence[ReplayedPatch]
) -> CheckoutChange | None:
    checkout = Checkout.find(workspace.checkout(target))
    if checkout is None:
        return None
    names = {str(patch.commit): patch.name for patch in kept}
    return CheckoutChange(Snapshot.of(checkout), done.head, names)

"""``vllm-stack rebase-upstream``: the stack, moved to another release of upstream."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from vllm_stack.errors import UsageError
from vllm_stack.options import offline_option, one_target_option, selected_targets, stack_command
from vllm_stack.pins import load_pin
from vllm_stack.rebase import Orders, Rebase
from vllm_stack.rebasereport import RebaseReport
from vllm_stack.releases import Source, find_candidate, history_between, history_to
from vllm_stack.session import Session
from vllm_stack.sources import base_of
from vllm_stack.thirdparty import compare_third_party

if TYPE_CHECKING:
    from vllm_stack.workspace import Workspace


class _Options(TypedDict):
    offline: bool
    dry_run: bool
    source: Source
    go_on: bool
    abort: bool
    skip: tuple[str, ...]
    accept_absorbed: tuple[str, ...]
    accept_contracts: tuple[str, ...]
    reason: str | None


@click.argument("wanted", required=False, metavar="[VERSION|latest|PATH|GITREF]")
@one_target_option
@offline_option
@click.option("--dry-run", is_flag=True, help="Say what would become of each patch; change nothing.")
@click.option(
    "--source",
    type=click.Choice(["auto", "sdist", "git"]),
    default="auto",
    show_default=True,
    help="What to take upstream's files from; git also names the commits behind a conflict.",
)
@click.option("--continue", "go_on", is_flag=True, help="Take the resolved patch and go on.")
@click.option("--abort", is_flag=True, help="Put everything back to what it was before.")
@click.option("--skip", multiple=True, metavar="PATCH", help="Take the patch off the stack; needs --reason.")
@click.option(
    "--accept-absorbed", multiple=True, metavar="PATCH", help="Take a patch off that upstream has by now."
)
@click.option(
    "--accept-contracts",
    multiple=True,
    metavar="PATCH",
    help="Keep a patch although contracts of it are broken; needs --reason.",
)
@click.option("--reason", default=None, metavar="TEXT", help="Why; it goes into the report and the series.")
def rebase_upstream(
    workspace: Workspace,
    wanted: str | None,
    target: str | None,
    **options: Unpack[_Options],
) -> RebaseReport:
    """Move the stack of one target to another release of upstream.

    Each patch is applied strictly, then by merging. The first one that conflicts, that upstream has
    absorbed, or whose contracts are broken, stops the rebase: its files wait in
    .vllm-stack/rebase-TARGET/tree. Edit them and run --continue. Pin, patches and series change together
    once all patches are decided, and until then --abort takes everything back.

    Example: tools/vllm-stack rebase-upstream latest --target vllm --dry-run
    """
    orders = _orders(options)
    going_on = options["go_on"] or (wanted is None and bool(orders.names))
    if sum((wanted is not None, going_on, options["abort"])) != 1:
        raise UsageError(
            "say one thing: the release to move to, --continue, or --abort", hint="rebase-upstream --help"
        )
    if options["dry_run"] and wanted is None:
        raise UsageError(
            "--dry-run goes with a release to move to: --continue and --abort are for a rebase that is open"
        )
    rebase = Rebase(workspace, _target(workspace, target, opened=wanted is None))
    if options["abort"]:
        return RebaseReport.of(rebase.abort())
    if wanted is None:
        return RebaseReport.of(_with_history(rebase, options).go_on(orders))
    if not options["dry_run"]:
        # Before anything is fetched; starting looks again.
        rebase.require_none_open()
        rebase.require_clean()
    candidate = find_candidate(
        workspace, rebase.target, wanted, source=options["source"], offline=options["offline"]
    )
    present = load_pin(workspace.pin_file(rebase.target))
    rebase = replace(rebase, history=history_to(workspace, present, candidate, offline=options["offline"]))
    others = compare_third_party(base_of(workspace, present, offline=True), candidate.base)
    if options["dry_run"]:
        return RebaseReport.of(rebase.dry_run(candidate, orders), others)
    return RebaseReport.of(rebase.start(candidate, orders, wanted), others)


def _with_history(rebase: Rebase, options: _Options) -> Rebase:
    """Return the open rebase with upstream's commits, where the user asks for them again."""
    session = Session.find(rebase.workspace, rebase.target) if options["source"] == "git" else None
    if session is None:
        return rebase
    present = load_pin(rebase.workspace.pin_file(rebase.target))
    found = history_between(rebase.workspace, present, session.pin, offline=options["offline"])
    return replace(rebase, history=found)


def _orders(options: _Options) -> Orders:
    why = " ".join((options["reason"] or "").split())
    if (options["skip"] or options["accept_contracts"]) and not why:
        option = "--skip" if options["skip"] else "--accept-contracts"
        raise UsageError(f"{option} needs a reason", hint="--reason 'why the patch may go, or may stay'")
    if options["reason"] is not None and not (
        options["skip"] or options["accept_absorbed"] or options["accept_contracts"]
    ):
        raise UsageError(
            "a reason for what?", hint="--reason goes with --skip, --accept-absorbed or --accept-contracts"
        )
    return Orders(
        dict.fromkeys(options["skip"], why),
        dict.fromkeys(options["accept_absorbed"], why or "upstream has the change"),
        dict.fromkeys(options["accept_contracts"], why),
    )


def _target(workspace: Workspace, named: str | None, *, opened: bool) -> str:
    """Return the target that is meant: the named one, the only one, or the only one with an open rebase."""
    targets = selected_targets(workspace, (named,) if named else ())
    if len(targets) > 1 and opened:
        targets = tuple(target for target in targets if workspace.rebase(target).is_dir()) or targets
    if len(targets) > 1:
        raise UsageError("say which target", hint=" or ".join(f"--target {target}" for target in targets))
    return targets[0]


command = stack_command("rebase-upstream")(rebase_upstream)

"""The explanation of a patch for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_stack.conflictview import View, diff_rows, render_conflicts

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.conflicts import FileConflict, HunkConflict
    from vllm_stack.explaining import Explanation, ImportedModule

#: Lines of the change of something imported: classes are long, and the JSON report has all.
_MOST_OF_AN_IMPORT = 12
_HUNK = {
    "conflict": "in conflict, see below",
    "doubtful": "its place is in doubt, see below",
    "applies": "applies",
    "absorbed": "is there already",
}


def render_explanation(console: Console, explanation: Explanation) -> None:
    """Print place by place what upstream did, then the conflicts in full."""
    view = View(console)
    view.heading(explanation.patch, explanation.subject, "bold")
    route = f"from {explanation.old_release} to {explanation.new_release}: {explanation.outcome}"
    view.line(f"  {route}")
    for message in explanation.messages:
        view.line(f"    {message}")
    view.gap()
    for file in explanation.files:
        _render_file(view, file)
    for module in explanation.imports:
        _render_module(view, module)
    if any(file.conflicting for file in explanation.files):
        view.gap()
        render_conflicts(console, explanation.files)


def _render_file(view: View, file: FileConflict) -> None:
    state = "" if file.status == "modified" else f": {file.status}"
    renamed = f" to {file.new_path}" if file.status == "renamed" else ""
    view.heading("file", f"{file.path}{state}{renamed}", "bold cyan")
    for hunk in file.hunks:
        _render_hunk(view, hunk)
    if file.status == "added":
        view.line("  new with the patch; the name is free")


def _render_hunk(view: View, hunk: HunkConflict) -> None:
    start = hunk.old_upstream.start if hunk.old_upstream else 1
    moved = f", now {hunk.line}" if hunk.line != start else ""
    what = _HUNK[hunk.outcome]
    if not hunk.upstream_change:
        state = "upstream left the place as it was" if hunk.new_upstream else "the file is not there"
        view.line(f"  hunk {hunk.number}, line {start}{moved}: {what}; {state}")
        return
    view.section(
        f"hunk {hunk.number}, line {start}{moved}: {what}; upstream:", diff_rows(hunk.upstream_change)
    )
    if hunk.outcome not in ("conflict", "doubtful"):
        view.remarks(hunk.notes, hunk.commits, ())


def _render_module(view: View, module: ImportedModule) -> None:
    changed = [name for name in module.names if name.change != "unchanged"]
    where = f" now {module.new_path}," if module.new_path not in (module.path, None) else ""
    count = f"+{module.added} -{module.removed}"
    state = "not there any more" if module.new_path is None else f"{count} lines"
    view.heading("imports", f"{module.path}:{where} {state}", "bold cyan")
    same = [name.name or "the module" for name in module.names if name.change == "unchanged"]
    if same:
        view.remark("unchanged", ", ".join(same))
    for name in changed:
        if name.change == "gone":
            view.remark("gone", name.name or "the module")
        if name.upstream_change:
            title = f"{name.name}, defined at line {name.line}; upstream:"
            view.section(title, diff_rows(name.upstream_change), _MOST_OF_AN_IMPORT)
        view.remarks((), name.commits, ())

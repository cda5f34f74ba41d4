"""``vllm-stack release``: the number that wheels of a stack carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_stack.applying import apply_stack
from vllm_stack.atomic import write_atomic
from vllm_stack.errors import LintError, UsageError
from vllm_stack.lint import lint_stack
from vllm_stack.options import offline_option, one_target_option, selected_targets, stack_command
from vllm_stack.refresh import differing_exports
from vllm_stack.report import Report
from vllm_stack.series import Release, with_release
from vllm_stack.sources import base_of
from vllm_stack.stack import SERIES_FILE, Stack
from vllm_stack.tomlfile import read_toml_text

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_stack.workspace import Workspace


@dataclass(frozen=True)
class ReleaseReport(Report):
    """The release that was recorded."""

    command: ClassVar[str] = "release"
    target: str
    upstream: str
    number: int
    stack_id: str

    @property
    def version(self) -> str:
        """The version of the stack's wheels."""
        return f"{self.upstream}+bw.{self.number}"

    def render(self, console: Console) -> None:
        """Print the version that the stack's wheels have from now on."""
        console.print(f"{self.target}: stack {self.stack_id[:12]} is {self.version}", markup=False)


@one_target_option
@offline_option
def release(workspace: Workspace, target: str | None, *, offline: bool) -> ReleaseReport:
    """Give the current stack of a target its release number, in series.toml.

    Wheels of a stack that has no number are called 0.33.0+bw.N.sXXXXXXXX after the last one that
    has; from here on this very stack's are called 0.33.0+bw.N.

    Example: tools/vllm-stack release --target vllm
    """
    if target is None:
        raise UsageError("say which target to release", hint="--target vllm")
    selected_targets(workspace, (target,))
    stack = Stack.load(workspace, target)
    errors = [str(finding) for finding in lint_stack(stack) if finding.is_error]
    if errors:
        raise LintError("a stack with lint errors is not released", details=errors)
    applied = apply_stack(base_of(workspace, stack.pin, offline=offline), stack)
    differing = differing_exports(stack, applied)
    if differing:
        raise LintError("a stack that `refresh --check` refuses is not released", details=differing)
    recorded = _next_release(stack)
    path = stack.directory / SERIES_FILE
    write_atomic(path, with_release(read_toml_text(path), recorded).encode())
    return ReleaseReport(target, recorded.upstream, recorded.number, recorded.stack_id)


def _next_release(stack: Stack) -> Release:
    upstream = stack.pin.release
    earlier = [known for known in stack.releases if known.upstream == upstream]
    for known in earlier:
        if known.stack_id == stack.stack_id:
            raise UsageError(f"this stack is released already, as {upstream}+bw.{known.number}")
    number = max((known.number for known in earlier), default=0) + 1
    return Release(upstream=upstream, number=number, stack_id=stack.stack_id)


command = stack_command("release")(release)

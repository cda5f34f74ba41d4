"""One exception class per kind of failure, each with the exit code that the README documents.

Only :func:`vllm_stack.cli.main` turns them into exit codes. A message says what is wrong and names
the thing that is wrong; ``hint`` says what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StackError(Exception):
    """Base of every failure that a user can act on."""

    exit_code = 1
    kind = "error"

    def __init__(self, message: str, *, hint: str | None = None, details: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        #: One line per finding, for failures that consist of several.
        self.details = tuple(details)


class UsageError(StackError):
    """Arguments, or a file that people write (pin, series), are not valid."""

    exit_code = 2
    kind = "usage"


class NetworkError(StackError):
    """A file could not be fetched: index unreachable, file absent, transfer broken off."""

    exit_code = 3
    kind = "network"


class IntegrityError(StackError):
    """Bytes are not what the pin, the RECORD or the archive format says."""

    exit_code = 4
    kind = "integrity"


class ConflictError(StackError):
    """A patch does not apply, or applies without changing anything."""

    exit_code = 5
    kind = "conflict"


class LintError(StackError):
    """A stack breaks a rule that ``lint`` or ``refresh --check`` checks."""

    exit_code = 6
    kind = "lint"


class BuildError(StackError):
    """A wheel cannot be built, or not where it was asked for."""

    exit_code = 7
    kind = "build"


class VerificationError(StackError):
    """A wheel or an installation is not the one that the stack gives."""

    exit_code = 8
    kind = "verification"


class WorkInProgressError(StackError):
    """Going on would lose work that is nowhere else."""

    exit_code = 9
    kind = "work-in-progress"


class TrialError(StackError):
    """The test of a patch fails."""

    exit_code = 10
    kind = "test"


EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "unexpected failure (please report it)",
    **{
        cls.exit_code: cls.kind
        for cls in (
            UsageError,
            NetworkError,
            IntegrityError,
            ConflictError,
            LintError,
            BuildError,
            VerificationError,
            WorkInProgressError,
            TrialError,
        )
    },
    130: "interrupted",
    143: "terminated",
}

#: Stands below the help of the group and of each command.
EXIT_CODES_HELP = "Exit codes: " + ", ".join(f"{code} {name}" for code, name in sorted(EXIT_CODES.items()))

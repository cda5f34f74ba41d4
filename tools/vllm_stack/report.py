"""Reports: what a command found or did, as one object with two renderers (terminal and JSON)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_stack.atomic import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vllm_stack.errors import StackError

#: Raised by one whenever a key of any report changes its meaning or goes away.
SCHEMA = 1


def escaped(text: str) -> str:
    """Return text with an escape in place of each character that must not reach a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def some(names: Sequence[str], most: int) -> str:
    """Return the first names, ``most`` at most, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Report:
    """Base of the commands' reports. Subclasses are frozen dataclasses of plain values."""

    command: ClassVar[str]

    def failure(self) -> StackError | None:
        """Return the error that the command ends with, if what it found is one."""
        return None

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        raise NotImplementedError


def to_plain(value: Any) -> Any:
    """Turn a report's values into what JSON knows; keys keep the order of their definition."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def _document(command: str, error: StackError | None, body: Mapping[str, Any]) -> bytes:
    document: dict[str, Any] = {"schema": SCHEMA, "command": command, "ok": error is None}
    if error is not None:
        document["error"] = {
            "kind": error.kind,
            "exit_code": error.exit_code,
            "message": error.message,
            "hint": error.hint,
            "details": list(error.details),
        }
    document.update(body)
    return (json.dumps(document, indent=2) + "\n").encode()


def write_json(destination: str, command: str, error: StackError | None, report: Report | None) -> None:
    """Write a report, or the error that a command ended with, to a file or (``-``) to stdout.

    A pipe or a device, such as `/dev/null`, is written to; only what is a file is replaced.
    """
    data = _document(command, error, {} if report is None else to_plain(report))
    if destination == "-":
        sys.stdout.write(data.decode())
        sys.stdout.flush()
        return
    path = Path(destination)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_atomic(path, data)

"""Progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

#: Told the number of bytes that are done; it may fall when a transfer has to start anew.
Advance = Callable[[int], None]


class Progress(Protocol):
    """Where a command tells how far it is."""

    def note(self, text: str) -> None:
        """Show one line."""

    def transfer(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Show the transfer of ``total`` bytes while the block runs."""


@dataclass(frozen=True)
class LineProgress:
    """Plain lines: for logs."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    #: Seconds between two lines about one transfer.
    interval: float = 10.0

    def note(self, text: str) -> None:
        """Write one line."""
        print(text, file=self.stream, flush=True)

    @contextmanager
    def transfer(self, name: str, total: int) -> Iterator[Advance]:
        """Write a line at the start, every ``interval`` seconds, and at the end."""
        started = last = time.monotonic()
        self.note(f"{name}: {megabytes(total)}")

        def advance(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= self.interval:
                last = time.monotonic()
                self.note(f"{name}: {megabytes(done)} of {megabytes(total)} ({done * 100 // total} %)")

        yield advance
        self.note(f"{name}: complete after {time.monotonic() - started:.1f} s")


@dataclass(frozen=True)
class BarProgress:
    """A bar with speed and remaining time: for a terminal."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def note(self, text: str) -> None:
        """Write one line."""
        print(text, file=self.stream, flush=True)

    @contextmanager
    def transfer(self, name: str, total: int) -> Iterator[Advance]:
        """Write the name and show a bar below it that goes away when the block ends."""
        from rich import progress  # noqa: PLC0415 - slow to import, and only needed here
        from rich.console import Console  # noqa: PLC0415

        columns = (
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        self.note(f"{name}: {megabytes(total)}")
        with progress.Progress(*columns, console=Console(file=self.stream), transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda done: bar.update(task, completed=done)


def progress_for(stream: TextIO | None = None) -> Progress:
    """Return the progress that suits ``stream`` (default: stderr)."""
    chosen = sys.stderr if stream is None else stream
    return BarProgress(chosen) if chosen.isatty() else LineProgress(chosen)


def megabytes(size: int) -> str:
    """Return ``size`` bytes for people, e.g. ``336.4 MB``; below a megabyte in kB."""
    return f"{size / 1e6:.1f} MB" if size >= 10**6 else f"{size / 1e3:.1f} kB"

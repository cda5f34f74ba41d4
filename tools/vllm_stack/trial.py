"""One run of a test command in a tree: followed while it runs, ended with all that it started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Literal

from vllm_stack.installed import users_environment

#: Seconds between asking a test to end and killing it.
_GRACE = 5.0
#: Bytes of a test's output that are kept: the last ones, where the failures stand.
KEPT_OUTPUT = 1 << 20
_BLOCK = 1 << 16

Outcome = Literal["passed", "failed", "timed-out"]


@dataclass(frozen=True)
class Trial:
    """A test command that ran in one tree."""

    patch: str
    """The patch whose test it is."""
    tree: str
    """The patch after which the tree stands."""
    command: str
    outcome: Outcome
    status: int | None
    """Exit status; negative for a signal; None when it was ended for taking too long."""
    seconds: float
    output: str
    """Standard output and errors as they came, the last KEPT_OUTPUT bytes."""
    bytes_left_out: int

    @property
    def passed(self) -> bool:
        """Whether the command said that all is well."""
        return self.outcome == "passed"


@dataclass
class Sink:
    """Keeps the end of what is written to it, and passes all of it on."""

    watcher: BinaryIO | None = None
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0

    def take(self, block: bytes) -> None:
        """Take one block of output."""
        self.total += len(block)
        self.kept += block
        del self.kept[:-KEPT_OUTPUT]
        if self.watcher is not None:
            self.watcher.write(block)
            self.watcher.flush()

    @property
    def text(self) -> str:
        """What was kept."""
        return self.kept.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Runner:
    """Runs test commands with one Python."""

    python: str
    timeout: float
    """Seconds that one command may take."""
    watcher: BinaryIO | None = None
    """Where output is shown while it comes."""

    def run(self, command: str, folder: Path, scratch: Path) -> tuple[Outcome, int | None, float, Sink]:
        """Run a shell command in ``folder``; whatever it makes elsewhere goes to ``scratch`` if it can.

        It is ended with its children when it takes too long, or when this process is interrupted.
        """
        sink = Sink(self.watcher)
        started = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=folder,
            env=self.environment(folder, scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: it can be ended as a whole, and Ctrl-C reaches it through us alone.
            start_new_session=True,
        )
        reader = threading.Thread(target=_copy, args=(process.stdout, sink), daemon=True)
        reader.start()
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(self.timeout)
        finally:
            end_group(process)
            reader.join(_GRACE)
        seconds = time.monotonic() - started
        if status is None:
            return "timed-out", None, seconds, sink
        return ("failed" if status else "passed"), status, seconds, sink

    def environment(self, folder: Path, scratch: Path) -> dict[str, str]:
        """Return the user's variables, with the tree first on Python's path and ``python`` the chosen one."""
        programs, temporary = scratch / "bin", scratch / "tmp"
        for made in (programs, temporary):
            made.mkdir(exist_ok=True)
        for name in ("python", "python3"):
            # Not a link: an environment's interpreter finds its packages by the path that it is started by.
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(self.python)} "$@"\n')
            program.chmod(0o755)
        kept = users_environment()
        beside = str(Path(self.python).parent) if os.sep in self.python else ""
        return {
            **kept,
            "PATH": _joined(str(programs), beside, kept.get("PATH", os.defpath)),
            "PYTHONPATH": _joined(str(folder), kept.get("PYTHONPATH", "")),
            "TMPDIR": str(temporary),
        }


def _joined(*entries: str) -> str:
    return os.pathsep.join(entry for entry in entries if entry)


def _copy(source: IO[bytes] | None, sink: Sink) -> None:
    assert source is not None  # noqa: S101 - the caller opened a pipe
    with source:
        while block := os.read(source.fileno(), _BLOCK):
            sink.take(block)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started in its group: asked first, killed a moment later."""
    for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        if not _signal_group(process.pid, number):
            break
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        if not _group_lives(process.pid, patience if number == signal.SIGTERM else 0):
            break
    process.kill()  # a moment after it was started it may not have its group yet
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a group; say whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _group_lives(group: int, patience: float) -> bool:
    """Wait until a group is gone; say whether it still is there after ``patience`` seconds."""
    until = time.monotonic() + patience
    while _signal_group(group, 0):
        if time.monotonic() >= until:
            return True
        time.sleep(0.05)
    return False


def make_trial(patch: str, tree: str, command: str, done: tuple[Outcome, int | None, float, Sink]) -> Trial:
    """Put what :meth:`Runner.run` returned beside what was run."""
    outcome, status, seconds, sink = done
    left_out = max(0, sink.total - KEPT_OUTPUT)
    return Trial(patch, tree, command, outcome, status, round(seconds, 3), sink.text, left_out)

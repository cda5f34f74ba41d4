"""Processes that end, or find the disk full, before the n-th thing that they do to a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: What the interpreter tells of before it does it, with the arguments that are paths.
_EVENTS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "shutil.rmtree": 1}
#: git's commands that change more than its store of objects.
_GIT = {"checkout", "index-pack", "init", "notes", "read-tree", "symbolic-ref", "update-index", "update-ref"}
_TOLD = "the step that was wanted"


def is_step(folders: tuple[str, ...], event: str, arguments: tuple[Any, ...]) -> bool:
    """Say whether an audit event is about to change something below one of ``folders``."""
    if event == "subprocess.Popen":
        environment = arguments[3] or {}
        return bool(_GIT & set(arguments[1])) and str(environment.get("GIT_DIR", "")).startswith(folders)
    if event == "open":
        path, _, flags = arguments
        changes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        # The tests themselves write git's configurations, under the hostile one.
        return changes and str(path).startswith(folders) and not str(path).endswith("/config")
    paths = arguments[: _EVENTS.get(event, 0)]
    return any(isinstance(path, (str, Path)) and str(path).startswith(folders) for path in paths)


def watch(folders: Sequence[Path], action: Callable[[int], None]) -> None:
    """Call ``action`` with the number of each step, from 1, before it is done."""
    steps = 0
    names = tuple(f"{folder}/" for folder in folders)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal steps
        if (event in _EVENTS or event in ("open", "subprocess.Popen")) and is_step(names, event, arguments):
            steps += 1
            action(steps)

    sys.addaudithook(hook)


def end_at(wanted: int) -> Callable[[int], None]:
    """Return an action that ends the process and all that it started, before step ``wanted``."""

    def action(step: int) -> None:
        if step == wanted:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    return action


def full_at(wanted: int) -> Callable[[int], None]:
    """Return an action that makes step ``wanted`` and all after it find the disk full."""

    def action(step: int) -> None:
        if step >= wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), _TOLD)

    return action


@dataclass(frozen=True)
class Fork:
    """A forked process with a process group of its own."""

    pid: int

    @classmethod
    def of(cls, work: Callable[[], int]) -> Fork:
        """Start ``work``, whose result is the exit status; it prints nothing."""
        pid = os.fork()
        if pid:
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)
            return cls(pid)
        code = 99
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            code = work()
        finally:
            os._exit(code)

    def wait(self) -> int:
        """Return the exit status, or minus the signal that ended it. All that it started has ended too."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while True:
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        return os.waitstatus_to_exitcode(status)

    def kill_after(self, seconds: float) -> int:
        """End it and all that it started after some time; return what :meth:`wait` does."""
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait()


def count_steps(folders: Sequence[Path], work: Callable[[], int]) -> int:
    """Return how many steps ``work`` takes below ``folders``, having done it in a fork."""
    reader, writer = os.pipe()

    def count(_step: int) -> None:
        os.write(writer, b".")

    def counted() -> int:
        watch(folders, count)
        return work()

    fork = Fork.of(counted)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        steps = len(pipe.read())
    fork.wait()
    return steps

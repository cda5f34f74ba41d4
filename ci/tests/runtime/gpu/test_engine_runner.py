"""Engines are run in the order, with the threads and for the time that they need."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import engine_runner
from complete_proofs import ContextProof

if TYPE_CHECKING:
    from pathlib import Path

    from engine_jobs import Job

FIRST, OTHERS = ContextProof.make_jobs(list(ContextProof.modes(["glm5"])))


class Noted(engine_runner.Runner):
    """Notes what would be run: engines, their threads and their time, and how many came before the wait."""

    def __init__(self, work: Path, seconds: float) -> None:
        super().__init__(work, time.monotonic() + seconds)
        self.started: list[tuple[Job, int, float]] = []
        self.waited: list[int] = []
        self.wait = lambda: self.waited.append(len(self.started))

    def _execute(self, job: Job, threads: int, seconds: float) -> str | None:
        self.started.append((job, threads, seconds))
        return "noted"


def test_engines_with_several_ranks_have_more_threads(tmp_path: Path) -> None:
    noted = Noted(tmp_path, 1000.0)
    noted.run_all([*FIRST, *OTHERS], 1, engine_runner.THREADS)
    assert {job: threads for job, threads, _ in noted.started} == {
        job: 4 if job.ranks > 1 else 1 for job in [*FIRST, *OTHERS]
    }


def test_all_but_the_first_engines_wait_for_what_they_need(tmp_path: Path) -> None:
    noted = Noted(tmp_path, 1000.0)
    noted.run_model(FIRST, OTHERS, 1)
    assert [job for job, _, _ in noted.started] == FIRST
    assert noted.waited == [len(FIRST)]
    assert {noted.runs[job].error for job in OTHERS} == {"not started: the first engine of this kind failed"}


def test_an_engine_has_half_as_much_time_again_as_the_slowest_took(tmp_path: Path) -> None:
    noted = Noted(tmp_path, 1000.0)
    noted.run_model(FIRST, OTHERS, 1)
    assert min(seconds for _, _, seconds in noted.started) >= 1.5 * 199.5
    late = Noted(tmp_path, 1.0)
    late.run_model(FIRST, OTHERS, 1)
    assert late.started == []
    assert {run.error for run in late.runs.values()} == {"not started: no time left"}

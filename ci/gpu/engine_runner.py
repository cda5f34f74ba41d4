"""Run engines on one GPU, several at a time, each in a process of its own, and keep what they gave.

A *proof* (`engine_proof`, `indexer_proof`) says which engines run, on what text, and what must be true
of what they give.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import small_models
import torch
from logged import run_logged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_jobs import Job

HERE = Path(__file__).resolve().parent
WEIGHTS_SEED = 7
SHORTEST_RUN = 5.0  # seconds
JOB_SECONDS = 300.0  # one of two ranks with drafts was seen to need 200
PILOT_THREADS, THREADS = 4, 1
RANKS_THREADS = 4  # of an engine with several ranks: its host has more cores, and both ranks compile


@dataclass
class Run:
    """What one job gave."""

    job: Job
    figures: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0

    def everything(self) -> np.ndarray:
        """Return all scored positions of the long batch."""
        return np.concatenate([self.arrays["prefill"], self.arrays["decode"]])

    def part(self, name: str) -> np.ndarray:
        """Return the positions of one part, or all of the long batch."""
        return self.everything() if name == "everything" else self.arrays[name]


class Runner:
    """Runs jobs in processes of their own, several at a time on one GPU."""

    def __init__(self, work: Path, deadline: float, *, reuse: bool = False) -> None:
        self.damages: Mapping[Job, Sequence[str]] = {}  # what to do to attention after all else
        self.wait: Callable[[], object] = lambda: None  # for what all but the first engines need
        self.work = work
        self.reuse = reuse
        self.deadline = deadline
        self.failed: set[tuple[str, str, str, int]] = set()  # kinds of engines whose first one failed
        self.runs: dict[Job, Run] = {}
        self.texts: dict[str, dict[str, list[list[int]]]] = {}
        self._lock = threading.Lock()
        self._ports = itertools.count(20000, 50)

    def prepare(self, model: str, batches: Mapping[str, tuple[Sequence[int], int, int]]) -> None:
        """Write a model and draw its text.

        Args:
            model: Key of `small_models.MODELS`.
            batches: By the name of a text: lengths of its prompts, tokens that continue each, seed.

        """
        language = small_models.write_model(small_models.MODELS[model], WEIGHTS_SEED, self.work / model)
        self.texts[model] = {
            name: [small_models.make_text(language, n + continued, seed + n) for n in lengths]
            for name, (lengths, continued, seed) in batches.items()
        }

    def run_model(self, pilots: list[Job], others: list[Job], workers: int) -> None:
        """Run all engines of one model: first those that fill the compilation caches."""
        self.run_all(pilots, max(1, min(len(pilots), workers)), PILOT_THREADS)
        self.failed |= {job.kind for job in pilots if self.runs[job].error and job.toolkit}
        self.wait()
        self.run_all(others, workers, THREADS)

    def run_all(self, jobs: list[Job], workers: int, threads: int) -> None:
        """Run jobs; keep what they gave."""
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda job: self._run(job, RANKS_THREADS if job.ranks > 1 else threads), jobs))

    def _run(self, job: Job, threads: int) -> None:
        started = time.monotonic()
        run = Run(job)
        left = self.deadline - started
        base = self.work / f"{job.name}.json"
        if self.reuse and base.with_suffix(".result.json").exists():
            run.error = None
        elif left < SHORTEST_RUN:
            run.error = "not started: no time left"
        elif job.kind in self.failed:
            run.error = "not started: the first engine of this kind failed"
        else:
            run.error = self._execute(job, threads, min(left, JOB_SECONDS))
        if run.error is None:
            run.figures = json.loads(base.with_suffix(".result.json").read_text())
            with np.load(base.with_suffix(".npz")) as arrays:
                run.arrays = {name: values.astype(np.float64) for name, values in arrays.items()}
        run.seconds = time.monotonic() - started
        with self._lock:
            self.runs[job] = run
            print(f"{run.seconds:6.1f} s  {job.name}  {run.error or 'ok'}", flush=True)

    def _execute(self, job: Job, threads: int, seconds: float) -> str | None:
        base = self.work / f"{job.name}.json"
        task = {
            "job": asdict(job),
            "folder": str(self.work / job.model),
            "damages": self.damages.get(job, ()),
            "texts": self.texts[job.model],
        }
        base.write_text(json.dumps(task))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": str(threads),
        }
        if job.ranks > 1:  # engines that start together would else find the same port free
            environment["VLLM_PORT"] = str(next(self._ports))
        command = [sys.executable, str(HERE / "engine_worker.py"), str(base)]
        if not job.toolkit:
            command = [str(HERE / "without_toolkit.sh"), str(self.work / f"{job.name}.hidden"), *command]
        return run_logged(command, base.with_suffix(".log"), environment, self.work, seconds)


def host(work: Path, *, reuse: bool) -> dict[str, Any]:
    """Describe the machine and the software, or the one that left its results in a folder."""
    path = work / "host.json"
    if not (reuse and path.exists()):
        whole = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        whole.write_text(json.dumps(describe_host()))
        whole.replace(path)  # no other thread reads half of it
    described: dict[str, Any] = json.loads(path.read_text())
    return described


def describe_host() -> dict[str, Any]:
    """Describe the machine and the software."""
    return {
        "card": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "cards": torch.cuda.device_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: metadata.version(name) for name in ("torch", "triton", "transformers", "vllm")},
    }

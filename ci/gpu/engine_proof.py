"""Prove TRITON_MLA_SPARSE in the real engine against the native backends of an SM90 GPU.

    python engine_proof.py --out results/engine.json --work /tmp/proof [--files INSTALLED.json] [--modes …]

Two small models with seeded weights (`small_models`), both model runners, eager and CUDA graphs,
`sparse_mla_force_mqa` on and off: in each of these modes every backend is asked about the same text
(`engine_worker`). The mean absolute difference of log-probabilities between our backend and each
native one must be at most 1.5 times that between the two native ones; our kernels must have run in
prefill and decode, and only in announced variants. The same holds for a batch of short prompts, whose
prefill must be dense, without our kernel, unless `sparse_mla_force_mqa` is on. To show that the text
depends on attention, our backend also runs with its output zeroed and with every top-k row moved by
one (with pooled keys also by a whole pool): each must change the mean log-probability by at least 100
times the largest of those bounds. A choice of modes without `v2-eager-mqa` measures no damage. Exits 1
if not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import small_models
import torch
from engine_worker import (
    DECODE_TOKENS,
    PROMPT_LENGTHS,
    SHORT_DECODE_TOKENS,
    SHORT_LENGTHS,
    SHORT_TEXT_SEED,
    TEXT_SEED,
    Job,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).resolve().parent
OURS = "TRITON_MLA_SPARSE"
NATIVE = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
ALLOWED_RATIO = 1.5
PARTS = ("everything", "prefill", "decode", "short_prefill", "short_decode")
# Tokens up to which our backend treats a request as a decode: more heads amortise the dense expansion later.
LONGEST_DECODE = {"glm5": 128, "glm53flash": 64}
DAMAGE_RATIO = 100.0
WEIGHTS_SEED = 7
REQUIRED_SHARE = 0.5  # of scored positions beyond twice the top-k
SHORTEST_RUN = 5.0  # seconds
JOB_SECONDS = 210.0  # an engine with empty caches was seen to need 97
PILOT_THREADS, THREADS = 4, 1


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


def modes(models: Iterable[str]) -> Iterator[Job]:
    """Yield every mode, as a job of our backend."""
    switches = (False, True)
    for model, runner, graphs, force in itertools.product(models, (2, 1), switches, switches):
        yield Job(model, OURS, runner, graphs=graphs, force_mqa=force)


def damage_reference(model: str) -> Job:
    """Return the mode in which damage is measured: everything goes through the kernel."""
    return Job(model, OURS, 2, graphs=False, force_mqa=True)


def damages(model: str) -> tuple[str, ...]:
    """Return how attention is damaged; a pooled model is also damaged by whole pools."""
    always = ("zero", "shift")
    return (*always, "shift_pool") if small_models.MODELS[model].is_pooled else always


def make_jobs(chosen: list[Job]) -> tuple[list[Job], list[Job]]:
    """Return the jobs that fill the compilation caches, one for each engine, and all others."""
    every = [replace(mode, backend=backend) for mode in chosen for backend in (OURS, *NATIVE)]
    pilots = {(job.model, job.backend): job for job in reversed(every)}
    first = [job for job in every if job in pilots.values()]
    return first, [job for job in every if job not in first]


class Runner:
    """Runs jobs in processes of their own, several at a time on one GPU."""

    def __init__(self, work: Path, deadline: float, *, reuse: bool = False) -> None:
        self.work = work
        self.reuse = reuse
        self.deadline = deadline
        self.failed_models: set[str] = set()
        self.runs: dict[Job, Run] = {}
        self.texts: dict[str, dict[str, list[list[int]]]] = {}
        self._lock = threading.Lock()

    def prepare(self, model: str) -> None:
        """Write a model and draw its text."""
        language = small_models.write_model(small_models.MODELS[model], WEIGHTS_SEED, self.work / model)
        batches = {
            "text": (PROMPT_LENGTHS, DECODE_TOKENS, TEXT_SEED),
            "short_text": (SHORT_LENGTHS, SHORT_DECODE_TOKENS, SHORT_TEXT_SEED),
        }
        self.texts[model] = {
            name: [small_models.make_text(language, n + continued, seed + n) for n in lengths]
            for name, (lengths, continued, seed) in batches.items()
        }

    def run_model(self, chosen: list[Job], workers: int) -> None:
        """Run all engines of one model: first one of each backend, to fill the caches."""
        pilots, others = make_jobs(chosen)
        self.run_all(pilots, len(pilots), PILOT_THREADS)
        if any(self.runs[job].error for job in pilots):
            self.failed_models.add(pilots[0].model)
        self.run_all(others, workers, THREADS)

    def run_all(self, jobs: list[Job], workers: int, threads: int) -> None:
        """Run jobs; keep what they gave."""
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda job: self._run(job, threads), jobs))

    def _run(self, job: Job, threads: int) -> None:
        started = time.monotonic()
        run = Run(job)
        left = self.deadline - started
        base = self.work / f"{job.name}.json"
        if self.reuse and base.with_suffix(".result.json").exists():
            run.error = None
        elif left < SHORTEST_RUN:
            run.error = "not started: no time left"
        elif job.model in self.failed_models:
            run.error = "not started: the first engines of this model failed"
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
        kinds = damages(job.model) if job == damage_reference(job.model) else ()
        task = {"job": asdict(job), "folder": str(self.work / job.model), "damages": kinds}
        base.write_text(json.dumps(task | self.texts[job.model]))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, str(HERE / "engine_worker.py"), str(base)]
        with base.with_suffix(".log").open("wb") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment,
                    cwd=self.work, timeout=seconds, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"stopped after {seconds:.0f} s"
        return None if done.returncode == 0 else f"exit status {done.returncode}"


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean absolute difference."""
    return float(np.abs(a - b).mean())


def assess_mode(mode: Job, runs: dict[Job, Run]) -> dict[str, Any]:
    """Compare the backends in one mode."""
    some = {backend: runs.get(replace(mode, backend=backend)) for backend in (OURS, *NATIVE)}
    errors = {b: run.error if run else "not run" for b, run in some.items()}
    if any(errors.values()):
        return {"mode": mode.mode, "errors": errors, "passed": False}
    found = {backend: run for backend, run in some.items() if run is not None}
    ours, natives = found[OURS], [found[backend] for backend in NATIVE]
    parts = {name: compare(name, ours, natives) for name in PARTS}
    problems = launch_problems(mode, ours, natives) + short_problems(mode, ours, natives)
    problems += [
        f"{name}: {part['ours']} exceeds {part['bound']:.2e}"
        for name, part in parts.items()
        if max(part["ours"].values()) > part["bound"]
    ]
    return {
        "mode": mode.mode,
        "differences": parts,
        "mean_log_probability": {b: float(run.everything().mean()) for b, run in found.items()},
        "launches": ours.figures["launches"],
        "cached_tokens": ours.figures["cached_tokens"],
        "short_cached_tokens": ours.figures["short_cached_tokens"],
        "short_dense_rows": {b: dense_rows(run) for b, run in found.items()},
        "variants": ours.figures["variants"],
        "problems": problems,
        "passed": not problems,
    }


def compare(part: str, ours: Run, natives: list[Run]) -> dict[str, Any]:
    """Return the differences over one part of the positions."""
    native = difference(natives[0].part(part), natives[1].part(part))
    return {
        "positions": len(ours.part(part)),
        "native": native,
        "bound": ALLOWED_RATIO * native,
        "ours": {run.job.backend: difference(ours.part(part), run.part(part)) for run in natives},
    }


def launch_problems(mode: Job, ours: Run, natives: list[Run]) -> list[str]:
    """Return what is wrong with the launches of our kernels."""
    launches = ours.figures["launches"]
    prefill, decode = launches["prefill_batch"], launches["decode_batch"]
    held = bool(decode["kernels"]["captured"])
    checks = {
        "no launch in prefill": phase_launches(prefill, "prefill") > 0,
        "no launch in decode": phase_launches(decode, "decode") > 0,
        "graphs were replayed in eager mode, or none in graph mode": (
            (decode["graph_replays"] > 0) == mode.graphs
        ),
        "graphs hold our launches but none was replayed in decode": (
            not held or decode["kernels"]["replayed"].get("decode", 0) > 0
        ),
        f"variants not announced: {ours.figures['unannounced_variants']}": (
            not ours.figures["unannounced_variants"]
        ),
        "the decode batch found no prefix in the cache": sum(ours.figures["cached_tokens"]) > 0,
        "a native backend launched our kernels": not any(run.figures["variants"] for run in natives),
    }
    return [problem for problem, holds in checks.items() if not holds]


def short_problems(mode: Job, ours: Run, natives: list[Run]) -> list[str]:
    """Return what is wrong with how the short prompts were attended.

    Dense attention takes every request that is no decode, unless `sparse_mla_force_mqa` is set: then one
    launch for each layer takes all of them.
    """
    launches = ours.figures["launches"]
    prefill, decode = launches["short_prefill_batch"], launches["short_decode_batch"]
    layers = small_models.MODELS[mode.model].layers.count("mla")
    every = layers * sum(SHORT_LENGTHS)
    decodes = layers * sum(n for n in SHORT_LENGTHS if n <= LONGEST_DECODE[mode.model])
    expected = (every, 0, 0) if mode.force_mqa else (0, decodes, every - decodes)
    rows = prefill["calls"]["rows"]
    found = (rows.get("prefill", 0), rows.get("decode", 0), dense_rows(ours))
    in_prefill = phase_launches(prefill, "prefill")
    checks = {
        f"short prompts: rows in prefill, decode and dense are {found}, not {expected}": found == expected,
        f"short prompts: {in_prefill} launches in prefill": (in_prefill > 0) == mode.force_mqa,
        "short prompts: no launch in decode": phase_launches(decode, "decode") > 0,
        "short prompts: a native backend differs in whether prefill is dense": all(
            (dense_rows(run) > 0) != mode.force_mqa for run in natives
        ),
    }
    return [problem for problem, holds in checks.items() if not holds]


def dense_rows(run: Run) -> int:
    """Return how many rows of the short prompts went through dense attention, over all layers."""
    return int(run.figures["launches"]["short_prefill_batch"]["dense"]["rows"].get("prefill", 0))


def phase_launches(batch: dict[str, Any], phase: str) -> int:
    """Return how often our kernels ran in a phase of a batch, outside and inside graphs."""
    kernels = batch["kernels"]
    return sum(int(kernels[how].get(phase, 0)) for how in ("eager", "replayed"))


def assess_damage(intact: Run, bound: float) -> dict[str, Any]:
    """Compare damaged attention with intact attention, in the same engine."""
    found: dict[str, Any] = {"bound": bound, "required_ratio": DAMAGE_RATIO, "passed": False}
    if intact.error or not bound > 0:
        return found | {"error": intact.error or "no bound"}
    before = intact.arrays["prefill"]
    kinds = damages(intact.job.model)
    for damage in kinds:
        after = intact.arrays[damage]
        change = abs(float(after.mean() - before.mean()))
        found[damage] = {
            "change_of_mean": change,
            "mean_absolute_change": difference(after, before),
            "ratio": change / bound,
        }
    found["passed"] = all(found[damage]["ratio"] >= DAMAGE_RATIO for damage in kinds)
    return found


def positions_beyond(index_topk: int) -> float:
    """Return the share of scored positions that lie beyond twice the top-k."""
    scored = [range(1, n) for n in PROMPT_LENGTHS] + [range(n, n + DECODE_TOKENS) for n in PROMPT_LENGTHS]
    positions = np.concatenate([np.array(part) for part in scored])
    return float((positions > 2 * index_topk).mean())


def host() -> dict[str, Any]:
    """Describe the machine and the software."""
    return {
        "card": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: metadata.version(name) for name in ("torch", "triton", "transformers", "vllm")},
    }


def assess(chosen: list[Job], runs: dict[Job, Run]) -> dict[str, Any]:
    """Judge all runs."""
    models = sorted({mode.model for mode in chosen})
    parts = {model: assess_model(model, [m for m in chosen if m.model == model], runs) for model in models}
    return {"models": parts, "passed": all(part["passed"] for part in parts.values())}


def assess_model(model: str, chosen: list[Job], runs: dict[Job, Run]) -> dict[str, Any]:
    """Judge the runs of one model."""
    rows = [assess_mode(mode, runs) for mode in chosen]
    bounds = [row["differences"]["everything"]["bound"] for row in rows if "differences" in row]
    reference, damage = damage_reference(model), None
    if reference in chosen:
        intact = runs.get(reference, Run(reference, error="not run"))
        damage = assess_damage(intact, max(bounds, default=0.0))
    share = positions_beyond(small_models.MODELS[model].index_topk)
    return {
        "native_references": list(NATIVE),
        "config": small_models.config(small_models.MODELS[model]),
        "share_beyond_twice_topk": share,
        "modes": rows,
        "damage": damage,
        "passed": (
            share > REQUIRED_SHARE
            and (damage is None or damage["passed"])
            and all(row["passed"] for row in rows)
        ),
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the short table: differences and their ratios, then launches and dense rows."""
    yield (
        f"{'mode':26} {'native':>9} {'ours':>9} {'ratio':>6} {'decode':>7} {'short:pre':>9} {'dec':>5}"
        f" | {'prefill':>7} {'decode':>6} {'short:pre':>9} {'dec':>5} {'dense':>6}"
    )
    for model, part in report["models"].items():
        for row in part["modes"]:
            yield mode_line(row)
        for damage in damages(model) if part["damage"] else ():
            figures = part["damage"].get(damage)
            text = f"{figures['ratio']:.0f} x bound" if figures else part["damage"]["error"]
            yield f"{model + ' ' + damage:26} {text}"
    yield "passed" if report["passed"] else "FAILED"


def mode_line(row: dict[str, Any]) -> str:
    """Return the line of one mode."""
    if "errors" in row:
        return f"{row['mode']:26} {row['errors']}"
    differences = row["differences"]
    whole = differences["everything"]
    worst = max(whole["ours"].values())
    ratio, decode, short_prefill, short_decode = (
        max(part["ours"].values()) / part["native"] if part["native"] else float("inf")
        for part in (differences[n] for n in ("everything", "decode", "short_prefill", "short_decode"))
    )
    counts = [
        phase_launches(row["launches"][f"{batch}{phase}_batch"], phase)
        for batch in ("", "short_")
        for phase in ("prefill", "decode")
    ]
    return (
        f"{row['mode']:26} {whole['native']:9.2e} {worst:9.2e} {ratio:6.2f} {decode:7.2f}"
        f" {short_prefill:9.2f} {short_decode:5.2f} | {counts[0]:7} {counts[1]:6} {counts[2]:9} {counts[3]:5}"
        f" {row['short_dense_rows'][OURS]:6} {'; '.join(row['problems'])}"
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--files", type=Path, help="manifest that wheel_files.py install wrote")
    parser.add_argument("--workers", type=int, default=14, help="engines at a time")
    parser.add_argument("--seconds", type=float, default=420, help="time for all engines")
    parser.add_argument("--reuse", action="store_true", help="keep results that the work folder holds")
    known = [mode.mode for mode in modes(small_models.MODELS)]
    parser.add_argument("--modes", nargs="+", choices=known, default=known, metavar="MODE")
    return parser.parse_args()


def main() -> int:
    """Run everything and write the report."""
    arguments = parse_arguments()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    runner = Runner(work, time.monotonic() + arguments.seconds, reuse=arguments.reuse)
    chosen = [mode for mode in modes(small_models.MODELS) if mode.mode in arguments.modes]
    for model in sorted({mode.model for mode in chosen}):
        runner.prepare(model)
    by_model = [[mode for mode in chosen if mode.model == model] for model in runner.texts]
    workers = max(1, arguments.workers // len(by_model))
    with ThreadPoolExecutor(len(by_model)) as pool:
        list(pool.map(lambda some: runner.run_model(some, workers), by_model))
    report = assess(chosen, runner.runs)
    manifest = json.loads(arguments.files.read_text()) if arguments.files else None
    report |= {
        "schema": 1,
        "host": host(),
        "wheel_files": manifest,
        "jobs": {
            job.name: {"seconds": run.seconds, "error": run.error} | {"phases": run.figures.get("seconds")}
            for job, run in runner.runs.items()
        },
    }
    arguments.out.write_text(json.dumps(report, indent=1))
    print("\n".join(table(report)))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

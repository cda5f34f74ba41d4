"""Prove GGUF loading in the real engine: a file against the same weights in bf16, and a wide file in time.

    python gguf_proof.py --plugin-tests TREE/tests --out gguf.json --work /tmp/gguf [--steps …] [--ranks 2]

`twin`: a small `glm-dsa` file of Q8_0, Q4_K, Q6_K, F16 and BF16 tensors and a checkpoint of the same weights
in bf16 score the same text. With the plugin's products replaced by products with dequantized weights, the
mean absolute difference of log-probabilities must be at most 1.5 times that between the two backends on the
checkpoint. The plugin's kernels round activations to 8 bits: their difference is reported, and must stay a
tenth of what one wrong tensor makes. With `--ranks 2` the same kernels on two GPUs must stay within the
difference that they have on one.

`wide`: a file with the widths of GLM-5, one dense and three MoE layers of 256 experts (some 20 GB), is loaded
and decoded; beside it the same model in bf16 with made-up weights. Exits 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf_worker import GgufJob
from logged import run_logged

HERE: Final = Path(__file__).resolve().parent
OURS, NATIVE = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"
ALLOWED_RATIO: Final = 1.5
DAMAGE_RATIO: Final = 10.0
LENGTHS: Final = (5, 77, 400, 1100, 2300)
VOCABULARY: Final = 512
JOB_SECONDS: Final = 200.0
WIDE_LAYERS, WIDE_EXPERTS = 4, 256


class Proof:
    """Runs engines, each in a process of its own, and keeps what they gave."""

    def __init__(self, work: Path, plugin_tests: Path, deadline: float) -> None:
        self.work = work
        self.deadline = deadline
        self.paths = [str(HERE), str(plugin_tests.resolve())]
        self.errors: dict[str, str] = {}
        self.figures: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        generator = random.Random(11)
        self.text = [[generator.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]

    def run(self, jobs: list[GgufJob], workers: int) -> None:
        """Run jobs, several at a time."""
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(self._run, jobs))

    def _run(self, job: GgufJob) -> None:
        base = self.work / f"{job.name}.json"
        base.write_text(json.dumps({"job": asdict(job), "text": self.text}))
        inherited = os.environ.get("PYTHONPATH")
        paths = [*self.paths, *([inherited] if inherited else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "4"}
        started = time.monotonic()
        seconds = max(1.0, min(JOB_SECONDS, self.deadline - started))
        command = [sys.executable, str(HERE / "gguf_worker.py"), str(base)]
        error = run_logged(command, base.with_suffix(".log"), environment, self.work, seconds)
        if error is None:
            self.figures[job.name] = json.loads(base.with_suffix(".result.json").read_text())
            with np.load(base.with_suffix(".npz")) as arrays:
                self.arrays[job.name] = arrays.get("prefill", np.zeros(0)).astype(np.float64)
        else:
            self.errors[job.name] = error
        print(f"{time.monotonic() - started:6.1f} s  {job.name}  {error or 'ok'}", flush=True)

    def difference(self, one: str, other: str) -> float | None:
        """Return the mean absolute difference between two jobs, if both ran."""
        if one not in self.arrays or other not in self.arrays:
            return None
        return float(np.abs(self.arrays[one] - self.arrays[other]).mean())


def twin_jobs(work: Path, ranks: int) -> list[GgufJob]:
    """Write the models and return the jobs that compare them."""
    from gguf_checkpoint import proof_config, proof_tensors, write_both

    config = proof_config()
    path, bf16 = map(str, write_both(work / "twin", config, proof_tensors(config)))
    damaged = str(write_both(work / "damaged", config, proof_tensors(config, damage=True))[0])
    jobs = [GgufJob(f"bf16-{b.lower()}", bf16, bf16, b) for b in (OURS, NATIVE)]
    jobs += [GgufJob(f"kernels-{b.lower()}", path, bf16, b) for b in (OURS, NATIVE)]
    jobs += [
        GgufJob(f"dequantized-{b.lower()}", path, bf16, b, kernels="dequantized") for b in (OURS, NATIVE)
    ]
    jobs.append(GgufJob("damaged", damaged, bf16, OURS, kernels="dequantized"))
    if ranks > 1:
        jobs.append(GgufJob("ranks", path, bf16, OURS, ranks=ranks))
        jobs.append(GgufJob("bf16-ranks", bf16, bf16, OURS, ranks=ranks))
    return jobs


def assess_twin(proof: Proof, ranks: int) -> dict[str, Any]:
    """Compare the log-probabilities."""
    ours, native = OURS.lower(), NATIVE.lower()
    between = proof.difference(f"bf16-{ours}", f"bf16-{native}")
    found: dict[str, Any] = {
        "positions": sum(LENGTHS) - len(LENGTHS),
        "between_backends": between,
        "dequantized": {b: proof.difference(f"dequantized-{b}", f"bf16-{b}") for b in (ours, native)},
        "kernels": {b: proof.difference(f"kernels-{b}", f"bf16-{b}") for b in (ours, native)},
        "damaged": proof.difference("damaged", f"bf16-{ours}"),
    }
    if ranks > 1:
        found["ranks"] = proof.difference("ranks", "bf16-ranks")
    figures = [between, found["damaged"], *found["dequantized"].values(), *found["kernels"].values()]
    if any(figure is None for figure in figures) or (ranks > 1 and found["ranks"] is None):
        return found | {"problems": ["an engine failed"]}
    found["bound"] = ALLOWED_RATIO * between if between is not None else 0.0
    kernels = max(found["kernels"].values())
    checks = {
        "dequantized weights differ from the checkpoint's": max(found["dequantized"].values())
        <= found["bound"],
        "the kernels differ as much as damage does": kernels * DAMAGE_RATIO <= found["damaged"],
        "several ranks differ more than one": ranks == 1 or found["ranks"] <= ALLOWED_RATIO * kernels,
    }
    return found | {"problems": [problem for problem, holds in checks.items() if not holds]}


def wide_jobs(work: Path) -> list[GgufJob]:
    """Write the wide file and return the jobs that time it."""
    from gguf_wide import wide_config, write_wide

    folder = work / "wide"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    path = write_wide(folder, wide_config(WIDE_LAYERS, WIDE_EXPERTS))
    print(f"{time.monotonic() - started:6.1f} s  wrote {path.stat().st_size / 1e9:.1f} GB", flush=True)
    return [
        GgufJob("wide-gguf", str(path), str(folder), OURS, timed=True),
        GgufJob("wide-bf16", str(folder), str(folder), OURS, timed=True, dummy=True),
    ]


def assess_wide(proof: Proof) -> dict[str, Any]:
    """Collect the times."""
    names = ("wide-gguf", "wide-bf16")
    found = {
        name: {key: proof.figures[name][key] for key in ("start_seconds", "decode")}
        for name in names
        if name in proof.figures
    }
    return {**found, "problems": [f"{name} failed" for name in names if name not in found]}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plugin-tests", type=Path, required=True, help="tests of the patched plugin")
    parser.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--files", type=Path, help="manifest that wheel_files.py install wrote")
    parser.add_argument("--steps", nargs="+", choices=("twin", "wide"), default=["twin", "wide"])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the host to use")
    parser.add_argument("--seconds", type=float, default=300, help="time for everything")
    return parser.parse_args()


def main() -> int:
    """Run everything and write the report."""
    arguments = parse_arguments()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(HERE), str(arguments.plugin_tests.resolve())]
    proof = Proof(work, arguments.plugin_tests, time.monotonic() + arguments.seconds)
    report: dict[str, Any] = {"schema": 1}
    if "twin" in arguments.steps:
        jobs = twin_jobs(work, arguments.ranks)
        proof.run([job for job in jobs if job.ranks == 1], workers=7)
        proof.run([job for job in jobs if job.ranks > 1], workers=1)
        report["twin"] = assess_twin(proof, arguments.ranks)
    if "wide" in arguments.steps:
        proof.run(wide_jobs(work), workers=1)
        report["wide"] = assess_wide(proof)
    report["errors"] = proof.errors
    report["jobs"] = proof.figures
    report["wheel_files"] = json.loads(arguments.files.read_text()) if arguments.files else None
    report["passed"] = not proof.errors and not any(report[step]["problems"] for step in arguments.steps)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(json.dumps({step: report[step] for step in arguments.steps}, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

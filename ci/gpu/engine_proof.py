"""Prove TRITON_MLA_SPARSE in the real engine against the native backends of an SM90 GPU.

    python engine_proof.py --out results/engine.json --work /tmp/proof [--files INSTALLED.json] [--modes …]

Other proofs (`--proof`) stand in `indexer_proof`, `complete_proofs` and `health_proofs`.

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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import dcp_merge
import indexer_proof
import numpy as np
import small_models
from comparison import launched
from complete_proofs import (
    ContextProof,
    DraftsProof,
    Fp8Proof,
    GroupsProof,
    MergeProof,
    PipelineProof,
    WideDraftsProof,
    WideProof,
)
from engine_jobs import DECODE_TOKENS, PROMPT_LENGTHS, SHORT_LENGTHS, TEXTS, Job
from engine_runner import Run, Runner, host
from health_proofs import AllocationProof, SyncProof

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OURS = "TRITON_MLA_SPARSE"
NATIVE = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
ALLOWED_RATIO = 1.5
PARTS = ("everything", "prefill", "decode", "short_prefill", "short_decode")
# Tokens up to which our backend treats a request as a decode: more heads amortise the dense expansion later.
LONGEST_DECODE = {"glm5": 128, "glm53flash": 64}
DAMAGE_RATIO = 100.0
REQUIRED_SHARE = 0.5  # of scored positions beyond twice the top-k


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
        "no launch in prefill": launched(prefill["kernels"], "prefill") > 0,
        "no launch in decode": launched(decode["kernels"], "decode") > 0,
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
    layers = small_models.MODELS[mode.model].mla_layers
    every = layers * sum(SHORT_LENGTHS)
    decodes = layers * sum(n for n in SHORT_LENGTHS if n <= LONGEST_DECODE[mode.model])
    expected = (every, 0, 0) if mode.force_mqa else (0, decodes, every - decodes)
    rows = prefill["calls"]["rows"]
    found = (rows.get("prefill", 0), rows.get("decode", 0), dense_rows(ours))
    in_prefill = launched(prefill["kernels"], "prefill")
    checks = {
        f"short prompts: rows in prefill, decode and dense are {found}, not {expected}": found == expected,
        f"short prompts: {in_prefill} launches in prefill": (in_prefill > 0) == mode.force_mqa,
        "short prompts: no launch in decode": launched(decode["kernels"], "decode") > 0,
        "short prompts: a native backend differs in whether prefill is dense": all(
            (dense_rows(run) > 0) != mode.force_mqa for run in natives
        ),
    }
    return [problem for problem, holds in checks.items() if not holds]


def dense_rows(run: Run) -> int:
    """Return how many rows of the short prompts went through dense attention, over all layers."""
    return int(run.figures["launches"]["short_prefill_batch"]["dense"]["rows"].get("prefill", 0))


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
        launched(row["launches"][f"{batch}{phase}_batch"]["kernels"], phase)
        for batch in ("", "short_")
        for phase in ("prefill", "decode")
    ]
    return (
        f"{row['mode']:26} {whole['native']:9.2e} {worst:9.2e} {ratio:6.2f} {decode:7.2f}"
        f" {short_prefill:9.2f} {short_decode:5.2f} | {counts[0]:7} {counts[1]:6} {counts[2]:9} {counts[3]:5}"
        f" {row['short_dense_rows'][OURS]:6} {'; '.join(row['problems'])}"
    )


class AttentionProof:
    """What `main` needs to know of this proof; `indexer_proof.IndexerProof` is the other."""

    models = ("glm5", "glm53flash")
    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text")}
    ranks = 1
    workers = 14
    modes = staticmethod(modes)
    make_jobs = staticmethod(make_jobs)
    assess = staticmethod(assess)
    table = staticmethod(table)

    @staticmethod
    def damages(chosen: list[Job]) -> dict[Job, tuple[str, ...]]:
        """Return which engines damage attention, and how."""
        return {mode: damages(mode.model) for mode in chosen if mode == damage_reference(mode.model)}


PROOFS: dict[str, Any] = {
    "attention": AttentionProof,
    "indexer": indexer_proof.IndexerProof,
    "fp8": Fp8Proof,
    "drafts": DraftsProof,
    "wide": WideProof,
    "wide-drafts": WideDraftsProof,
    "groups": GroupsProof,
    "sync": SyncProof,
    "allocations": AllocationProof,
    "dcp": ContextProof,
    "dcp-merge": MergeProof,
    "pipeline": PipelineProof,
}


def choose(proof: Any, names: list[str] | None) -> list[Job]:
    """Return those modes of a proof that are named; all of them where no names are given."""
    return [mode for mode in proof.modes(proof.models) if mode.mode in (names or [mode.mode])]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. At least one of the modes must be this proof's; others are left to theirs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--proof", choices=PROOFS, default="attention", help="what is proven")
    parser.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--files", type=Path, help="manifest that wheel_files.py install wrote")
    parser.add_argument("--workers", type=int, help="engines at a time; default: as the proof says")
    parser.add_argument("--seconds", type=float, default=420, help="time for all engines")
    parser.add_argument("--reuse", action="store_true", help="keep results that the work folder holds")
    known = {mode.mode for proof in PROOFS.values() for mode in proof.modes(proof.models)}
    parser.add_argument("--modes", nargs="+", choices=sorted(known), metavar="MODE")
    arguments = parser.parse_args(words)
    proof = PROOFS[arguments.proof]
    if not choose(proof, arguments.modes):
        names = " ".join(mode.mode for mode in choose(proof, None))
        parser.error(f"--proof {arguments.proof} has none of these modes; it has {names}")
    return arguments


def main() -> int:
    """Run everything and write the report."""
    arguments = parse_arguments()
    proof = PROOFS[arguments.proof]
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    runner = Runner(work, time.monotonic() + arguments.seconds, reuse=arguments.reuse)
    chosen = choose(proof, arguments.modes)
    runner.damages = proof.damages(chosen)
    for model in sorted({mode.model for mode in chosen}):
        runner.prepare(model, proof.texts)
    by_model = [proof.make_jobs([m for m in chosen if m.model == model]) for model in runner.texts]
    workers = max(1, (arguments.workers or proof.workers) // len(by_model))
    with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(len(by_model)) as pool:
        merge = beside.submit(dcp_merge.probe) if arguments.proof == "dcp" else None
        if merge:  # beside the first engines, which have no context parallelism
            runner.wait = merge.result
        list(pool.map(lambda jobs: runner.run_model(jobs[0], jobs[1], workers), by_model))
    facts = {"cutedsl_merge": merge.result()} if merge else {}
    report = proof.assess(chosen, runner.runs)
    manifest = json.loads(arguments.files.read_text()) if arguments.files else None
    report |= facts | {
        "schema": 1,
        "host": host(work, reuse=arguments.reuse),
        "wheel_files": manifest,
        "jobs": {
            job.name: {"seconds": run.seconds, "error": run.error} | {"phases": run.figures.get("seconds")}
            for job, run in runner.runs.items()
        },
    }
    arguments.out.write_text(json.dumps(report, indent=1))
    print("\n".join([*proof.table(report), *map(str, facts.items())]))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

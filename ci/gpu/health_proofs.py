"""The proofs that ask an engine of TRITON_MLA_SPARSE other things than how close it is to a native one.

`sync`: generating with VLLM_GPU_SYNC_CHECK=error, and the same with a read of the device planted in our
backend, which must be found. Where FLASHMLA_SPARSE dies of the same error in the same place, the read is not
our backend's: the table says that nothing is shown there. Ours must not fail in any other way.

`allocations`: while a steady batch decodes, replays of graphs allocate nothing, the device's memory does not
grow, our `forward_mqa` allocates nothing, and our steps allocate no more often than FLASHMLA_SPARSE's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from comparison import OURS
from complete_proofs import FLASHMLA, FP8, USUAL, Compared
from engine_jobs import ALLOCATIONS, SYNC, TEXTS, Job, first_of_each_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from engine_runner import Run

PLANTED = "GPU<->CPU sync detected"


class Examined(Compared):
    """A proof in which each engine is judged, beside others of the same mode."""

    texts: ClassVar = {name: TEXTS[name] for name in ("text", "short_text")}

    @classmethod
    def others(cls, mode: Job) -> list[Job]:
        """Return what is run beside our engine of a mode."""
        return [replace(mode, backend=FLASHMLA)]

    @classmethod
    def make_jobs(cls, chosen: list[Job]) -> tuple[list[Job], list[Job]]:
        """Return the first jobs, one for each kind of engine, and all others."""
        return first_of_each_kind(job for mode in chosen for job in (mode, *cls.others(mode)))

    @classmethod
    def examine(cls, ours: Run, others: list[Run]) -> dict[str, Any]:
        """Return figures of one mode and, under "problems", what is wrong with them."""
        raise NotImplementedError

    @classmethod
    def assess(cls, chosen: list[Job], runs: Mapping[Job, Run]) -> dict[str, Any]:
        """Judge all runs."""
        rows = [cls.row(mode, runs) for mode in chosen]
        return {"modes": rows, "passed": bool(rows) and all(row["passed"] for row in rows)}

    @classmethod
    def row(cls, mode: Job, runs: Mapping[Job, Run]) -> dict[str, Any]:
        """Judge one mode."""
        jobs = [mode, *cls.others(mode)]
        errors = {job.name: runs[job].error if job in runs else "not run" for job in jobs}
        if any(errors.values()):
            failed = {name: error for name, error in errors.items() if error}
            return {"mode": mode.mode, "errors": failed, "passed": False}
        found = cls.examine(runs[mode], [runs[job] for job in jobs[1:]])
        return {"mode": mode.mode, **found, "passed": not found["problems"]}

    @staticmethod
    def table(report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the short table."""
        for row in report["modes"]:
            if "errors" in row:
                yield f"{row['mode']:40} {row['errors']}"
                continue
            yield f"{row['mode']:40} {row['says']}"
            for problem in row["problems"]:
                yield f"    {problem}"
        yield "passed" if report["passed"] else "FAILED"


class SyncProof(Examined):
    """Synchronisation with the host."""

    @classmethod
    def modes(cls, models: Iterable[str]) -> Iterator[Job]:
        """Yield all modes."""
        for model in models:
            for runner, graphs, cache in USUAL:
                yield Job(model, OURS, runner, graphs, task=SYNC, cache=cache)
            yield Job(model, OURS, 2, graphs=True, task=SYNC, cache=FP8, draft=3)

    @classmethod
    def assess(cls, chosen: list[Job], runs: Mapping[Job, Run]) -> dict[str, Any]:
        """Judge all runs; at least one must have shown something."""
        report = super().assess(chosen, runs)
        report["passed"] &= any("errors" not in row and row["clean"] is None for row in report["modes"])
        return report

    @classmethod
    def examine(cls, ours: Run, others: list[Run]) -> dict[str, Any]:
        """Look at what the engines died of."""
        clean, planted = ours.figures["clean"], ours.figures["planted"]
        native = others[0].figures["clean"]
        upstreams = clean is not None and clean == native
        problems = [f"{clean} (FLASHMLA_SPARSE: {native})"] if clean and not upstreams else []
        if clean is None and PLANTED not in str(planted):
            problems.append(f"the planted read was not found: {planted}")
        says = f"ours {'fails' if clean else 'clean'}, FLASHMLA_SPARSE {'fails' if native else 'clean'}"
        says = f"NOT SHOWN, both engines fail in the same place: {clean}" if upstreams else says
        return {"clean": clean, "planted": planted, "native": native, "says": says, "problems": problems}


class AllocationProof(Examined):
    """Allocations on the device."""

    @classmethod
    def modes(cls, models: Iterable[str]) -> Iterator[Job]:
        """Yield all modes."""
        for model in models:
            for graphs, cache in ((True, "auto"), (False, "auto"), (True, FP8), (False, FP8)):
                yield Job(model, OURS, 2, graphs, task=ALLOCATIONS, cache=cache)

    @classmethod
    def examine(cls, ours: Run, others: list[Run]) -> dict[str, Any]:
        """Compare counts."""
        left_out = ("job", "seconds")
        counted = {
            run.job.backend: {name: value for name, value in run.figures.items() if name not in left_out}
            for run in (ours, others[0])
        }
        mine, native = counted.values()
        problems = [
            f"{name}: {mine[name]}"
            for name in ("inside_replays", "per_call", "device_allocations", "reserved_bytes")
            if mine[name]
        ]
        if mine["per_step"] > native["per_step"]:
            problems.append(f"per_step: {mine['per_step']:.2f}, FLASHMLA_SPARSE {native['per_step']:.2f}")
        if (mine["replays"] > 0) != ours.job.graphs:
            problems.append(f"{mine['replays']} replays")
        says = ", ".join(f"{name} {mine[name]:.1f} ({native[name]:.1f})" for name in ("per_call", "per_step"))
        return {
            "counts": counted,
            "says": f"{says}; {mine['inside_replays']} in {mine['replays']} replays",
            "problems": problems,
        }  # fmt: skip

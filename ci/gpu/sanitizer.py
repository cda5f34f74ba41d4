"""Run the sparse-MLA kernel under compute-sanitizer: memcheck and racecheck, each with a planted fault.

    python sanitizer.py run --out results/sanitizer.json --work DIR --root SITE [--seconds 60]

`run` starts five processes of `work` under compute-sanitizer, side by side: both tools on the shapes
below, and on planted faults, which they must find, each in a process of its own, since nothing runs on after
one: a row far behind the cache, read by our kernel for a bf16 cache and by that for fp8_ds_mla; an unguarded
exchange through shared memory. Only kernels of our kernels' name are
instrumented. PyTorch's caching allocator is off and no buffer has guard bytes, so that memcheck knows
where each tensor ends. `work` stops between two shapes when its time is up; the report says which ones
ran. Exits 1 if a tool found something, missed the planted fault or did not finish. A host that refuses
the tool (gVisor) is reported as that, with exit status 0: there, the guard bytes of `kernel_check` have
to do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import standalone
import torch
from kernel_check import Checker, Guarded, Shape, make_cache

KERNEL_NAME = "kernel"  # of both our kernels, and of the planted race
MEMCHECK, RACECHECK = "memcheck", "racecheck"
SUMMARIES = {
    MEMCHECK: re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    RACECHECK: re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
}
TOOL_OPTIONS = {
    # What PyTorch asks of the driver in vain is not what is checked.
    MEMCHECK: ("--report-api-errors", "no", "--padding", "4096"),
    RACECHECK: ("--racecheck-report", "all", "--print-limit", "20"),
}
REFUSAL = "Device not supported"  # what gVisor makes it say
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
FIRST_PORT = 49152
OVERRUN = 25.0  # seconds that a process may need to end after its time
FAR_ROW = 2**31 - 1  # terabytes behind the cache
RACE = f"""
extern "C" __global__ void {KERNEL_NAME}(int *out) {{
    __shared__ volatile int held[64];
    held[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = held[63 - threadIdx.x];
}}
"""
_PLAIN = Shape(
    tokens=1, heads=8, width=128, rope=64, dtype=torch.bfloat16, chip=0, counts="random", high_rows=True,
    duplicates=False, with_lse=True, graph=False, seed=1,
)  # fmt: skip
# On 132 multiprocessors: each tile of the GPU at hand, with and without splits, with a bf16 cache and with
# fp8_ds_mla; one tile of a smaller chip; one that decodes fp8_ds_mla in software.
SHAPES = (
    replace(_PLAIN, heads=1, counts="full"),
    replace(_PLAIN, tokens=3, width=256, rope=0, counts="zero-heavy", seed=2),
    replace(_PLAIN, tokens=70, seed=3),
    replace(_PLAIN, tokens=133, heads=16, rope=0, with_lse=False, seed=4),
    replace(_PLAIN, tokens=9, heads=17, width=256, duplicates=True, seed=5),
    replace(_PLAIN, tokens=67, heads=17, rope=0, counts="short", seed=6),
    replace(_PLAIN, tokens=16, heads=64, width=512, counts="random", seed=7),
    replace(_PLAIN, tokens=67, heads=64, counts="zero-heavy", seed=8),
    replace(_PLAIN, tokens=4, heads=128, width=256, dtype=torch.float16, counts="full", seed=9),
    replace(_PLAIN, tokens=34, heads=128, rope=0, with_lse=False, seed=10),
    replace(_PLAIN, tokens=5, heads=24, width=384, chip=1, seed=11),
    replace(_PLAIN, tokens=3, heads=24, width=256, fp8=True, seed=12),
    replace(_PLAIN, tokens=67, heads=8, rope=0, chip=2, fp8=True, seed=13),
    replace(_PLAIN, tokens=70, fp8=True, seed=14),
    replace(_PLAIN, tokens=133, heads=16, rope=0, with_lse=False, fp8=True, seed=15),
    replace(_PLAIN, tokens=20, heads=32, width=512, counts="zero-heavy", fp8=True, seed=16),
    replace(_PLAIN, tokens=133, heads=24, rope=0, counts="short", fp8=True, seed=17),
    replace(_PLAIN, tokens=133, heads=16, fp8=True, seed=18),
    replace(_PLAIN, tokens=133, heads=24, counts="short", fp8=True, seed=19),
    replace(_PLAIN, tokens=20, heads=16, width=512, fp8=True, seed=20),
)
FAULTY = {False: SHAPES[0], True: replace(SHAPES[0], fp8=True)}
"""By whether the cache is fp8_ds_mla: the shape in which a far row is read, whose rows count all entries."""


@dataclass(frozen=True)
class Check:
    """One process under one tool."""

    tool: str
    planted: bool
    fp8: bool = False  # of the planted far row

    @property
    def name(self) -> str:
        """Name in the report and of files."""
        return self.tool + "-planted" * self.planted + "-fp8" * self.fp8


CHECKS = (
    *(Check(tool, planted) for tool in (MEMCHECK, RACECHECK) for planted in (False, True)),
    Check(MEMCHECK, planted=True, fp8=True),
)


def find_tool() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))


def runtime() -> str:
    """Name what the machine runs in, by its kernel."""
    release = platform.release()
    version = Path("/proc/version").read_text()
    if "-fc-" in release:
        return "firecracker"
    return "gvisor" if "gvisor" in version.lower() or release == "4.4.0" else "unknown"


class Process:
    """compute-sanitizer with one check in it."""

    def __init__(self, check: Check, tool: str, arguments: argparse.Namespace) -> None:
        self.check = check
        self.log: Path = arguments.work / f"{check.name}.log"
        self.done: Path = arguments.work / f"{check.name}.done.json"
        self.done.unlink(missing_ok=True)
        self.seconds = arguments.seconds
        self.started = time.monotonic()
        command = [
            tool, "--tool", check.tool, "--target-processes", "application-only", "--launch-timeout", "60",
            "--port", str(FIRST_PORT + 100 * CHECKS.index(check)),
            "--kernel-name", f"kernel_name={KERNEL_NAME}", *TOOL_OPTIONS[check.tool],
            sys.executable, str(Path(__file__).resolve()), "work", "--out", str(self.done),
            "--root", str(arguments.root), "--seconds", str(arguments.seconds),
            *(["--planted", check.tool] if check.planted else []), *(["--fp8"] if check.fp8 else []),
        ]  # fmt: skip
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def finish(self) -> dict[str, Any]:
        """Wait for the process and return what it found."""
        try:
            code: int | None = self.process.wait(self.started + self.seconds + OVERRUN - time.monotonic())
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            code = None
        text = self.log.read_text(errors="replace")
        done = json.loads(self.done.read_text()) if self.done.exists() else {}
        reported = [line for line in text.splitlines() if line.startswith("=========")]
        return {
            "exit_status": code,
            "seconds": round(time.monotonic() - self.started, 1),
            "found": count_found(self.check.tool, text),
            "refused": REFUSAL in text,
            "shapes": done.get("shapes", []),
            "launched": done.get("launched", []),
            "problems": done.get("problems", []),
            "report": reported[:40] + (["…", *reported[-5:]] if len(reported) > 45 else []),
        }


def count_found(tool: str, text: str) -> int | None:
    """Return how much a tool found, by the summary that ends its report; None without a summary."""
    numbers = SUMMARIES[tool].findall(text)
    return int(numbers[-1]) if numbers else None


def assess(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return what is wrong."""
    problems = []
    for check in CHECKS:
        result = results[check.name]
        if result["found"] is None:
            problems.append(f"{check.name}: no summary, exit status {result['exit_status']}")
        elif check.planted and not result["found"]:
            problems.append(f"{check.name}: the planted fault was not found")
        elif not check.planted:
            problems += plain_problems(check.name, result)
    return problems


def plain_problems(name: str, result: dict[str, Any]) -> list[str]:
    """Return what is wrong with the check of the intact kernel."""
    problems = [f"{name}: {problem}" for problem in result["problems"]]
    if result["found"]:
        problems.append(f"{name}: {result['found']} found")
    elif result["exit_status"]:
        problems.append(f"{name}: exit status {result['exit_status']}, see {name}.log")
    if len(result["shapes"]) < len(SHAPES):
        problems.append(f"{name}: {len(result['shapes'])} of {len(SHAPES)} shapes in time")
    return problems


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and write the report."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    tool = find_tool()
    report: dict[str, Any] = {
        "schema": 1,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "runtime": runtime(),
        "kernel": platform.release(),
        "tool": None,
    }
    if tool is None:
        report |= {"refused": "compute-sanitizer is not installed", "problems": []}
    else:
        version = subprocess.check_output([tool, "--version"], text=True)
        report["tool"] = version.rpartition("Version ")[2].strip()
        processes = [Process(check, tool, arguments) for check in CHECKS]
        results = {process.check.name: process.finish() for process in processes}
        refused = REFUSAL if all(result["refused"] for result in results.values()) else None
        report |= {"checks": results, "refused": refused, "problems": [] if refused else assess(results)}
    arguments.out.write_text(json.dumps(report, indent=1))
    print("\n".join(table(report)))
    return 1 if report["problems"] else 0


def table(report: dict[str, Any]) -> list[str]:
    """Return the lines of the short table."""
    lines = [f"compute-sanitizer {report['tool']} on {report['runtime']} ({report['kernel']})"]
    if report["refused"]:
        lines.append(f"refused: {report['refused']}")
    for name, result in report.get("checks", {}).items():
        lines.append(
            f"{name:20} found {result['found']!s:>5}   shapes {len(result['shapes']):2}"
            f"   variants {len(result['launched']):2}   {result['seconds']:5.1f} s"
        )
    return [*lines, f"{len(report['problems'])} problems", *report["problems"]]


def plant_race() -> None:
    """Exchange values between two warps without a barrier, in a kernel of our kernels' name."""
    cupy = importlib.import_module("cupy")
    out = cupy.zeros(64, dtype=cupy.int32)
    cupy.RawKernel(RACE, KERNEL_NAME)((1,), (64,), (out,))
    cupy.cuda.runtime.deviceSynchronize()


def check_shape(checker: Checker, shape: Shape, *, far_row: bool) -> list[str]:
    """Launch the kernel on one shape and return what is wrong with the output."""
    inputs, _, launch = checker.prepare(shape)
    if far_row:
        inputs.indices.tensor[0, 0] = FAR_ROW
    launch()
    torch.cuda.synchronize()
    empty = inputs.valid_counts == 0
    problems = []
    if not bool(torch.isfinite(inputs.out.tensor).all()):
        problems.append(f"output is not finite: {shape}")
    if bool((inputs.out.tensor[empty] != 0).any()):
        problems.append(f"a row without entries is not zero: {shape}")
    return problems


def work(arguments: argparse.Namespace) -> int:
    """Do what one tool watches."""
    deadline = time.monotonic() + arguments.seconds
    if arguments.planted == RACECHECK:
        plant_race()
        return 0
    Guarded.exact = True
    shapes = (FAULTY[arguments.fp8],) if arguments.planted else SHAPES
    pairs = {shape.cache for shape in shapes}
    # Without PyTorch's caching allocator memcheck ran out of an H200's memory while all rows were drawn.
    caches = {pair: make_cache(*pair, seed=5, repeated=True) for pair in pairs}
    checker = Checker(standalone.load_kernel(arguments.root), caches)
    done: dict[str, Any] = {"shapes": [], "problems": []}
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        done["problems"] += check_shape(checker, shape, far_row=arguments.planted == MEMCHECK)
        done["shapes"].append(asdict(shape) | {"dtype": str(shape.dtype)})
        done["launched"] = sorted(map(str, checker.launched))
        arguments.out.write_text(json.dumps(done))
        print(f"{deadline - time.monotonic():6.1f} s left after {shape}")
    return 0


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running, working = commands.add_parser("run"), commands.add_parser("work")
    for command in (running, working):
        command.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
        command.add_argument("--root", type=Path, required=True, help="directory with the kernel's files")
        command.add_argument("--seconds", type=float, default=60.0, help="time for each process")
    running.add_argument("--work", type=Path, required=True, help="folder for logs")
    working.add_argument("--planted", choices=(MEMCHECK, RACECHECK))
    working.add_argument("--fp8", action="store_true", help="plant the far row in an fp8_ds_mla cache")
    return parser.parse_args(words)


def main() -> int:
    """Run all checks, or do what one of them watches."""
    arguments = parse_arguments()
    return run(arguments) if arguments.command == "run" else work(arguments)


if __name__ == "__main__":
    sys.exit(main())

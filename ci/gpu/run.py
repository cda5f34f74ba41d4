"""Run everything that a GPU host has to show, in one command: kernel, sanitizers, engines, speed table.

    python run.py --files FILES.zip --site /tmp/site --out DIR [--seconds 560] [--steps engine …]

Many engines at a time fill the host: `PROOFS` says how long each proof's take. Proofs that are chosen
together run one after the other, each within its share of the time, and the soak, which has few engines, runs
beside them. What does not fit is refused before anything starts.

Installs the files of the built wheel (`wheel_files.py pack`) over the unpacked official wheel and
checks their hashes, runs the kernel check (then the sanitizers) and the engine proof side by side and
the benchmark alone afterwards, and prints a short table. Every report in DIR says card, commit, stack
id, wheel hash, Triton and torch versions. Exits 1 if any step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import wheel_files

HERE = Path(__file__).resolve().parent
BENCH_SECONDS = 75.0  # with both caches
LOGITS_BENCH_SECONDS = 45.0  # took 20, and DeepGEMM's compiler
SANITIZER_SECONDS = 60.0  # took 12 with 17 shapes and the check's binaries
CHECK_SECONDS = 90.0  # took 65 to 77 with 32 cores
LOGITS_CHECK_SECONDS = 45.0  # took 43
CHECK, SANITIZER, ENGINE, BENCH = "kernel-check", "sanitizer", "engine", "kernel-bench"
LOGITS_CHECK, LOGITS_BENCH = "logits-check", "logits-bench"
INDEXER, SOAK = "indexer", "soak"
STEPS = {
    CHECK: "kernel_check.py",
    SANITIZER: "sanitizer.py",
    BENCH: "kernel_bench.py",
    LOGITS_CHECK: "logits_check.py",
    LOGITS_BENCH: "logits_bench.py",
    SOAK: "soak.py",
}


class Proof(NamedTuple):
    """A step that `engine_proof.py` runs."""

    name: str
    """What `engine_proof.py --proof` calls it."""
    seconds: float
    """What its modes take with empty caches. Measured, but `drafts`, `wide-drafts` and `dcp-merge` are
    reckoned from their engines: the latter two start all of theirs together, and such of `wide` and `dcp`
    took up to 124 and 134 s.

    `wide` and `groups` took 520 s in one call, four segments of the soak beside them.
    """
    cards: int = 1


PROOFS = {
    ENGINE: Proof("attention", 300),
    INDEXER: Proof("indexer", 300),
    "fp8": Proof("fp8", 400),
    "drafts": Proof("drafts", 300),
    "wide": Proof("wide", 250),
    "wide-drafts": Proof("wide-drafts", 150),
    "groups": Proof("groups", 170),
    "sync": Proof("sync", 150),
    "allocations": Proof("allocations", 140),
    "dcp": Proof("dcp", 380, cards=2),
    "dcp-merge": Proof("dcp-merge", 190, cards=2),
    "pipeline": Proof("pipeline", 220, cards=2),
}
STEPS |= dict.fromkeys(PROOFS, "engine_proof.py")
DEFAULT_STEPS = [CHECK, SANITIZER, ENGINE, BENCH, LOGITS_CHECK, LOGITS_BENCH]
SOAK_END = 60.0  # seconds for up to 26 requests that the soak's engines have begun, and for their reports
LEAST_SOAK = 240.0  # an engine with empty caches starts in up to 140


BENCHES = {BENCH: BENCH_SECONDS, LOGITS_BENCH: LOGITS_BENCH_SECONDS}
SANITIZER_END = 35.0  # seconds for what the tools have begun, and for their report


class Session:
    """One run of the steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        self.work: Path = arguments.work.resolve()
        self.site: Path = arguments.site.resolve()
        self.installed = self.work / "installed.json"
        self.modes: list[str] = arguments.modes
        self.segments: list[int] = arguments.segments
        self.reuse: bool = arguments.reuse
        self.names = {step: step for step in STEPS}
        if arguments.engine_name:
            self.names |= dict.fromkeys(PROOFS.keys() & set(arguments.steps), arguments.engine_name)
        self.deadline: float = time.monotonic() + arguments.seconds
        self.results: dict[str, str] = {}

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return max(1.0, self.deadline - time.monotonic())

    def install(self, files: Path) -> None:
        """Install the files under test.

        Raises:
            WheelFilesError: They do not match their hashes, or results of another wheel are to be kept.

        """
        manifest = wheel_files.install(files, self.site)
        before = json.loads(self.installed.read_text()) if self.installed.exists() else manifest
        if self.reuse and before["wheel"] != manifest["wheel"]:
            raise wheel_files.WheelFilesError(f"{self.work} holds results of {before['wheel']['name']}")
        self.installed.write_text(json.dumps(manifest))

    def report(self, step: str) -> Path:
        """Return the path of a step's report."""
        return self.out / f"{self.names[step]}.json"

    def log(self, step: str) -> Path:
        """Return the path of what a step prints."""
        return self.work / f"{self.names[step]}.txt"

    def start(self, step: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a step; its output goes to a log file."""
        self.report(step).unlink(missing_ok=True)
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if step in (CHECK, SANITIZER, BENCH, LOGITS_CHECK, LOGITS_BENCH):
            environment["TRITON_CACHE_DIR"] = str(self.work / "triton")  # they share what they compile
        if step in (CHECK, SANITIZER, LOGITS_CHECK, LOGITS_BENCH):
            # Many short processes: they load the kernel's files alone, since importing vLLM takes too long.
            environment["PYTHONPATH"] = str(self.site / "vllm" / "third_party")  # deep_gemm
            options += ("--root", str(self.site))
        else:
            paths = (self.site, self.site / "nvidia_cutlass_dsl" / "dsl_packages")
            environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        command = [sys.executable, str(HERE / STEPS[step])]
        command += ["run"] if step in (SANITIZER, SOAK) else []
        command += ["--out", str(self.out if step == SOAK else self.report(step)), *options]
        with self.log(step).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finish(self, step: str, process: subprocess.Popen[bytes]) -> None:
        """Wait for a step and note how it ended."""
        try:
            code = process.wait(self.left())
            self.results[step] = "passed" if code == 0 else f"FAILED, exit status {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.results[step] = "FAILED, no time left"
        self.stamp(step)

    def stamp(self, step: str) -> None:
        """Add to a report what was tested and how the step ended; the soak's reports say so themselves."""
        path = self.report(step)
        if path.exists():
            report: dict[str, Any] = json.loads(path.read_text())
            report["wheel_files"] = json.loads(self.installed.read_text())
            report["result"] = self.results[step]
            path.write_text(json.dumps(report, indent=1))

    def run(self, steps: list[str]) -> None:
        """Run the steps: checks and sanitizers beside the engines, the benchmarks alone."""
        reserved = sum(seconds for bench, seconds in BENCHES.items() if bench in steps)
        proofs = [step for step in steps if step in PROOFS]
        soak = self.start_soak(reserved) if SOAK in steps else None
        first = {proofs[0]: self.start_proof(proofs, reserved)} if proofs else {}
        for step, process in (first | self.start_checks(steps, reserved)).items():
            self.finish(step, process)
        for number in range(1, len(proofs)):
            self.finish(proofs[number], self.start_proof(proofs[number:], reserved))
        if soak is not None:
            self.finish(SOAK, soak)
        for bench in (BENCH, LOGITS_BENCH):
            if bench in steps:
                later = LOGITS_BENCH_SECONDS if bench == BENCH and LOGITS_BENCH in steps else 0.0
                seconds = f"{self.left() - later - 15:.0f}"
                self.finish(bench, self.start(bench, "--budget-s", seconds))

    def start_checks(self, steps: list[str], reserved: float) -> dict[str, subprocess.Popen[bytes]]:
        """Start the checks of the kernels, and the sanitizers once the first one has compiled them."""
        running = {step: self.start(step) for step in (CHECK, LOGITS_CHECK) if step in steps}
        if SANITIZER in steps:
            if CHECK in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[CHECK].wait(self.wait_for_binaries(reserved))
            running[SANITIZER] = self.start_sanitizer(reserved)
        return running

    def wait_for_binaries(self, reserved: float) -> float:
        """Return how long the sanitizers wait for the check: all that leaves them their own time.

        What it has not compiled by then, each of them compiles for itself, in that time.
        """
        return max(CHECK_SECONDS, self.left() - reserved - SANITIZER_SECONDS - SANITIZER_END)

    def start_proof(self, steps: list[str], reserved: float) -> subprocess.Popen[bytes]:
        """Start the first of some proofs, with its share of the time that they have together."""
        step = steps[0]
        together = sum(PROOFS[later].seconds for later in steps)
        seconds = max(1.0, (self.left() - reserved - 10) * PROOFS[step].seconds / together)
        options = ["--proof", PROOFS[step].name, "--work", str(self.work / step)]
        options += ["--files", str(self.installed), "--seconds", f"{seconds:.0f}"]
        options += ["--reuse"] if self.reuse else []
        return self.start(step, *options, *(["--modes", *self.modes] if self.modes else []))

    def start_soak(self, reserved: float) -> subprocess.Popen[bytes]:
        """Start the soak with as much time as there is."""
        seconds = max(1.0, self.left() - reserved - SOAK_END)
        options = ["--segments", *map(str, self.segments), "--seconds", f"{seconds:.0f}"]
        options += ["--planted"] if 0 in self.segments else []  # once in a soak, which has segment 0
        return self.start(SOAK, *options, "--work", str(self.work / SOAK), "--files", str(self.installed))

    def start_sanitizer(self, reserved: float) -> subprocess.Popen[bytes]:
        """Start the sanitizers with as much time as there is."""
        seconds = max(20.0, min(SANITIZER_SECONDS, self.left() - reserved - SANITIZER_END))
        return self.start(SANITIZER, "--work", str(self.work / "sanitizer"), "--seconds", f"{seconds:.0f}")

    def keep_logs(self) -> None:
        """Keep these steps' logs, and engines' figures, from which `engine_proof.py --reuse` can judge again.

        The log-probabilities are an archive of their own: should they be too much to be carried back, what
        the engines said still is.
        """
        steps = [step for step in (*PROOFS, SOAK) if step in self.results]
        logs = [f"{step}/{kind}" for step in steps for kind in ("*.log", "host.json", "*.result.json")]
        printed = [self.log(step).name for step in self.results]
        self.archive("logs", [*printed, *(["sanitizer/*.log"] if SANITIZER in self.results else []), *logs])
        self.archive("arrays", [f"{step}/*.npz" for step in steps])

    def archive(self, name: str, patterns: list[str]) -> None:
        """Keep files of the work folder."""
        with tarfile.open(self.out / f"{name}.tar.gz", "w:gz") as archive:
            for pattern in patterns:
                for path in sorted(self.work.glob(pattern)):
                    archive.add(path, path.relative_to(self.work))

    def table(self) -> None:
        """Print the end of each step's output, and how each step ended."""
        for step in self.results:
            print(f"\n--- {step}")
            lines = self.log(step).read_text(errors="replace").splitlines()
            print("\n".join(line[:200] for line in lines[-26:]))
        print()
        for step, result in self.results.items():
            print(f"{step:14} {result}")


def shortage(steps: list[str], seconds: float, *, whole: bool) -> str | None:
    """Say that the steps need more time than there is, None if there is enough.

    Args:
        steps: What is to run.
        seconds: Time for everything.
        whole: Whether the proofs run all their engines; how long a choice of them takes is not known.

    """
    needed = sum(PROOFS[step].seconds for step in steps if step in PROOFS) if whole else 0.0
    needed = max(needed, SOAK_END + LEAST_SOAK if SOAK in steps else 0.0, checking(steps))
    needed += sum(time for bench, time in BENCHES.items() if bench in steps)
    return f"{' '.join(steps)} need some {needed:.0f} s, not {seconds:.0f}" if needed > seconds else None


def checking(steps: list[str]) -> float:
    """Return the seconds that the kernels' checks take: the sanitizers follow the first, not the other."""
    check, logits, sanitizers = (
        seconds if step in steps else 0.0
        for step, seconds in (
            (CHECK, CHECK_SECONDS),
            (LOGITS_CHECK, LOGITS_CHECK_SECONDS),
            (SANITIZER, SANITIZER_SECONDS),
        )
    )
    return max(logits, check + sanitizers)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, required=True, help="what wheel_files.py pack wrote")
    parser.add_argument("--site", type=Path, required=True, help="unpacked official wheel")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "gpu-proof"))
    parser.add_argument("--seconds", type=float, default=560.0, help="time for everything")
    parser.add_argument("--steps", nargs="+", choices=sorted(STEPS), default=DEFAULT_STEPS)
    parser.add_argument(
        "--modes", nargs="+", default=[], metavar="MODE", help="only these modes of the engine"
    )
    parser.add_argument("--engine-name", help="name of the engines' report, without suffix")
    parser.add_argument("--segments", type=int, nargs="+", default=[0, 1], help="of the soak, see soak.py")
    parser.add_argument(
        "--reuse", action="store_true", help="run only the engines whose results --work does not hold yet"
    )
    arguments = parser.parse_args(words)
    arguments.steps = list(dict.fromkeys(arguments.steps))
    found = shortage(arguments.steps, arguments.seconds, whole=not (arguments.modes or arguments.reuse))
    if found:
        parser.error(found)
    return arguments


def main() -> int:
    """Run the steps and print the table."""
    arguments = parse_arguments()
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    session = Session(arguments)
    try:
        session.install(arguments.files)
    except wheel_files.WheelFilesError as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    session.run(arguments.steps)
    session.keep_logs()
    session.table()
    return 0 if all(result == "passed" for result in session.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

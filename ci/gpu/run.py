"""Run everything that a GPU host has to show, in one command: kernel check, engines, speed table.

    python run.py --files FILES.zip --site /tmp/site --out DIR [--seconds 560] [--steps engine …]

Installs the files of the built wheel (`wheel_files.py pack`) over the unpacked official wheel and
checks their hashes, runs the kernel check and the engine proof side by side and the benchmark alone
afterwards, and prints a short table. Every report in DIR says card, commit, stack id, wheel hash,
Triton and torch versions. Exits 1 if any step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import wheel_files

HERE = Path(__file__).resolve().parent
BENCH_SECONDS = 70.0
CHECK, ENGINE, BENCH = "kernel-check", "engine", "kernel-bench"
STEPS = {CHECK: "kernel_check.py", ENGINE: "engine_proof.py", BENCH: "kernel_bench.py"}


class Session:
    """One run of the steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        self.work: Path = arguments.work.resolve()
        self.site: Path = arguments.site.resolve()
        self.installed = self.work / "installed.json"
        self.deadline: float = time.monotonic() + arguments.seconds
        self.results: dict[str, str] = {}

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return max(1.0, self.deadline - time.monotonic())

    def install(self, files: Path) -> None:
        """Install the files under test."""
        manifest = wheel_files.install(files, self.site)
        self.installed.write_text(json.dumps(manifest))

    def start(self, step: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a step; its output goes to a log file."""
        report = self.out / f"{step}.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / STEPS[step]), "--out", str(report), *options]
        paths = (self.site, self.site / "nvidia_cutlass_dsl" / "dsl_packages")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if step != CHECK:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        with (self.out / f"{step}.txt").open("wb") as log:
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
        """Add to a report what was tested and how the step ended."""
        path = self.out / f"{step}.json"
        if path.exists():
            report: dict[str, Any] = json.loads(path.read_text())
            report["wheel_files"] = json.loads(self.installed.read_text())
            report["result"] = self.results[step]
            path.write_text(json.dumps(report, indent=1))

    def run(self, steps: list[str]) -> None:
        """Run the steps: the check beside the engines, the benchmark alone."""
        reserved = BENCH_SECONDS if BENCH in steps else 0.0
        running = {}
        if ENGINE in steps:
            seconds = f"{max(1.0, self.left() - reserved - 10):.0f}"
            options = ("--work", str(self.work / "engine"), "--files", str(self.installed))
            running[ENGINE] = self.start(ENGINE, *options, "--seconds", seconds)
        if CHECK in steps:
            # Its many processes load the kernel's files alone; importing vLLM in each takes too long.
            running[CHECK] = self.start(CHECK, "--root", str(self.site))
        for step, process in running.items():
            self.finish(step, process)
        if BENCH in steps:
            self.finish(BENCH, self.start(BENCH, "--budget-s", f"{self.left() - 15:.0f}"))

    def keep_logs(self) -> None:
        """Keep the engines' logs and figures, from which `engine_proof.py --reuse` can judge again."""
        folder = self.work / "engine"
        if folder.exists():
            with tarfile.open(self.out / "engine-logs.tar.gz", "w:gz") as archive:
                for path in sorted(folder.iterdir()):
                    if path.name.endswith((".log", ".npz", ".result.json")):
                        archive.add(path, path.name)

    def table(self) -> None:
        """Print the end of each step's output, and how each step ended."""
        for step in self.results:
            print(f"\n--- {step}")
            lines = (self.out / f"{step}.txt").read_text(errors="replace").splitlines()
            print("\n".join(line[:200] for line in lines[-26:]))
        print()
        for step, result in self.results.items():
            print(f"{step:14} {result}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, required=True, help="what wheel_files.py pack wrote")
    parser.add_argument("--site", type=Path, required=True, help="unpacked official wheel")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "gpu-proof"))
    parser.add_argument("--seconds", type=float, default=560.0, help="time for everything")
    parser.add_argument("--steps", nargs="+", choices=sorted(STEPS), default=list(STEPS))
    return parser.parse_args()


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

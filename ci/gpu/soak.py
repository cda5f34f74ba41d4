"""Soak an engine with mixed traffic, ask everything again, and look for NaN, hangs and other answers.

    python soak.py run --segments 0 1 --seconds 300 --out DIR --work DIR --files INSTALLED.json [--planted]
    python soak.py merge --out soak.json DIR/soak-*.json [--least 1800]

A segment is a seed and a kind of engine (`ENGINES`, in turn); it can run in any session, and its report is
one file. `traffic` draws its requests: 1 to 30,000 tokens, bursts, common beginnings, cancellations. The KV
cache is so small that requests are preempted. Requests arrive as long as the segment lasts. Those of its
first part are recorded; in the rest fewer arrive, and recorded ones are asked again among them, last ones
first.

The same answer is the same tokens up to a near tie and the same log-probabilities within
`traffic.MEAN_BOUND`: the backend does not serve VLLM_BATCH_INVARIANT, so that the bits depend on how batches
are made up. A report counts what was compared, and a segment that compared too little fails.

With `--planted` there is one more engine, an eager one (`planted-soak.json`): once all answers are recorded,
attention returns zeros in a step now and then. Most of the answers under way again in such a step must be
found to differ.

Each segment's engine is a process of its own. It writes after every step that it is alive; the watchdog ends
it, with a trace of its threads in the log, when it has not for `HANG_SECONDS`, and reports a hang. `merge`
refuses segments of different wheels, and those in which requests arrived for too short a time. It adds up the
engines' seconds; `clock_seconds` is the time in which at least one of them ran, as segments run side by side.
Exits 1 if a segment failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import small_models
import traffic
from engine_jobs import SOAK, Job
from engine_runner import WEIGHTS_SEED, host

HERE: Final = Path(__file__).resolve().parent
OURS = "TRITON_MLA_SPARSE"
START_SECONDS: Final = 300.0  # until an engine with empty caches has started beside others
HANG_SECONDS: Final = 60.0
TRACE_SECONDS: Final = 5.0
LEAST_SECONDS: Final = 1800.0  # of traffic of all segments together
# Replays find another answer only among what they compare. Nearly all recorded requests should be asked
# again; how many depends on what else the GPU does. Of 256 tokens that engines with drafts chose, 0.71 to 1
# came before the first other one (results/{indexer,fp8,dcp}.json); a soak's answers have 192 at most.
LEAST_REPLAYED: Final = 0.5  # of the recorded answers
LEAST_COMPARED: Final = 0.5  # of the tokens of those that were asked again
ENGINES: Final = (
    Job("glm5", OURS, 2, graphs=True, task=SOAK, cache="fp8_ds_mla"),
    Job("glm53flash", OURS, 2, graphs=True, task=SOAK),
    Job("glm5", OURS, 2, graphs=True, task=SOAK),
    Job("glm53flash", OURS, 2, graphs=True, task=SOAK, cache="fp8_ds_mla"),
)
"""Segment K runs the one at K modulo their number."""
PLANTED_ENGINE: Final = Job("glm5", OURS, 2, graphs=False, task=SOAK)  # what is in a graph cannot be damaged
PLANTED_SECONDS: Final = 360.0  # at most, with the engine's start, which takes up to 120 on 32 cores
LEAST_HIT: Final = 20  # answers under way in a damaged step
LEAST_FOUND: Final = 0.5  # of them; one in five has parted before


@dataclass(frozen=True)
class Segment:
    """One segment.

    Attributes:
        number: Its seed.
        seconds: Until nothing more arrives, with the engine's start.
        folder: Of its files.
        planted: Whether steps are damaged.

    """

    number: int
    seconds: float
    folder: Path
    planted: bool = False

    @property
    def job(self) -> Job:
        """Its engine."""
        return PLANTED_ENGINE if self.planted else ENGINES[self.number % len(ENGINES)]

    @property
    def name(self) -> str:
        """Name of its files."""
        return "planted-soak" if self.planted else f"soak-{self.number}"

    @property
    def base(self) -> Path:
        """Path of its files, without the suffix."""
        return self.folder / self.name


class Watchdog:
    """Ends a process that has not said for too long that it is alive.

    Args:
        beat: File that the process touches.
        limit: Seconds without a touch.
        start: Seconds until the first.

    """

    def __init__(self, beat: Path, limit: float = HANG_SECONDS, start: float = START_SECONDS) -> None:
        self.beat = beat
        self.limit = limit
        self.start = start

    def watch(self, process: subprocess.Popen[bytes]) -> str | None:
        """Wait for the process; say that it hung, or failed, None if it did neither."""
        began = time.time()
        while True:
            try:
                code = process.wait(timeout=min(1.0, self.limit / 4))
            except subprocess.TimeoutExpired:
                if self.silence(began) > 0:
                    return self.end(process)
            else:
                return None if code == 0 else f"exit status {code}"

    def silence(self, began: float) -> float:
        """Return by how many seconds the process has been silent for too long."""
        if self.beat.exists():
            return time.time() - self.beat.stat().st_mtime - self.limit
        return time.time() - began - self.start

    def end(self, process: subprocess.Popen[bytes]) -> str:
        """Have the process print where it is (`faulthandler`), and end it."""
        process.send_signal(signal.SIGUSR1)
        time.sleep(min(TRACE_SECONDS, self.limit))
        process.kill()
        process.wait()
        return f"hung: no step for {self.limit:.0f} s"


def run_segment(segment: Segment, files: dict[str, Any] | None) -> dict[str, Any]:
    """Run the engine of a segment; return its report."""
    base = segment.base
    for suffix in (".beat", ".result.json"):
        base.with_suffix(suffix).unlink(missing_ok=True)
    base.with_suffix(".json").write_text(json.dumps(asdict(segment) | {"folder": str(segment.folder)}))
    command = [sys.executable, str(HERE / "soak_worker.py"), str(base.with_suffix(".json"))]
    started = time.monotonic()
    with base.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=segment.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        error = Watchdog(base.with_suffix(".beat")).watch(process)
    result = base.with_suffix(".result.json")
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() and error is None else {}
    return report_of(segment, found, error) | {
        "elapsed": time.monotonic() - started,
        "wheel_files": files,
    }


def report_of(segment: Segment, found: dict[str, Any], error: str | None) -> dict[str, Any]:
    """Judge what the engine of a segment gave."""
    report: dict[str, Any] = {**dict.fromkeys(traffic.SUMS, 0), **{name: [] for name in traffic.LISTS}}
    report |= dict.fromkeys((*traffic.TIMES, "began", "ended", "widest_swing"), 0.0)
    report |= ({"hit": 0, "found": 0} if segment.planted else {}) | found
    if error:
        report["hangs"] = [error]
    problems = [f"{name}: {report[name]}" for name in traffic.LISTS if report[name]]
    problems += [f"no {name}" for name in traffic.NEEDED if not report[name]]
    problems += too_few(report)
    if segment.planted:
        problems = planted_problems(report)
    return {
        "schema": traffic.SCHEMA, "segment": segment.number, "engine": segment.job.name,
        **report, "problems": problems, "passed": not problems, "result": "FAILED" if problems else "passed",
    }  # fmt: skip


def planted_problems(report: dict[str, Any]) -> list[str]:
    """Say what is wrong with a segment in which most of the damaged answers must be found."""
    problems = [f"hangs: {report['hangs']}"] if report["hangs"] else []
    hit, found = report["hit"], report["found"]
    if hit < LEAST_HIT or found < LEAST_FOUND * hit:
        problems.append(f"{found} of {hit} damaged answers were found, not {LEAST_FOUND:.0%} of {LEAST_HIT}")
    return problems


def too_few(report: dict[str, Any]) -> list[str]:
    """Say which replays are missing for a segment to have compared enough."""
    shares = (
        ("replays", "recorded", LEAST_REPLAYED),
        ("tokens_compared", "replayed_tokens", LEAST_COMPARED),
    )
    return [
        f"{report[part]} {part} of {report[whole]} {whole}, not {least:.0%}"
        for part, whole, least in shares
        if report[part] < least * report[whole]
    ]


def keep_segment(segment: Segment, files: dict[str, Any] | None, out: Path) -> dict[str, Any]:
    """Run the engine of a segment and write its report, whatever becomes of the others; return it."""
    report = run_segment(segment, files) | {"host": host(segment.folder, reuse=True)}
    (out / f"{segment.name}.json").write_text(json.dumps(report, indent=1))
    return report


def run(arguments: argparse.Namespace) -> bool:
    """Run segments, each in a process of its own, at the same time."""
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = json.loads(arguments.files.read_text()) if arguments.files else None
    segments = [Segment(number, arguments.seconds, work) for number in arguments.segments]
    if arguments.planted:
        segments.append(Segment(0, min(arguments.seconds, PLANTED_SECONDS), work, planted=True))
    for model in sorted({segment.job.model for segment in segments}):
        small_models.write_model(small_models.MODELS[model], WEIGHTS_SEED, work / model)
    with ThreadPoolExecutor(len(segments)) as pool:
        reports = list(pool.map(lambda segment: keep_segment(segment, files, arguments.out), segments))
    print("\n".join(map(line, reports)))
    return all(report["passed"] for report in reports)


def line(report: dict[str, Any]) -> str:
    """Return what the table says of a segment, or of all together."""
    numbers = ", ".join(f"{report[name]} {name}" for name in traffic.SUMS)
    name = f"segment {report['segment']}" if "segment" in report else f"{len(report['segments'])} segments"
    if "hit" in report:
        name = f"planted: {report['found']} of {report['hit']} damaged answers found"
    result = "passed" if report["passed"] else f"FAILED {report.get('problems', '')}"
    times = f"{report['seconds']:.0f} s, {report['traffic_seconds']:.0f} s with arrivals"
    times += f", in {report['clock_seconds']:.0f} s" if "clock_seconds" in report else ""
    return f"{name}: {times}, {numbers}; {result}"


def merge(arguments: argparse.Namespace) -> bool:
    """Merge the reports of segments."""
    report = traffic.merge([json.loads(path.read_text()) for path in arguments.reports], arguments.least)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(line(report))
    return bool(report["passed"])


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--segments", type=int, nargs="+", required=True, help="seeds; each is run once")
    running.add_argument("--seconds", type=float, required=True, help="of each engine, with its start")
    running.add_argument("--planted", action="store_true", help="one more engine, with damaged steps")
    running.add_argument("--out", type=Path, required=True, help="folder for the reports")
    running.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    running.add_argument("--files", type=Path, help="manifest that wheel_files.py install wrote")
    merging = commands.add_parser("merge")
    merging.add_argument("--out", type=Path, required=True, help="report to write")
    merging.add_argument(
        "--least", type=float, default=LEAST_SECONDS, help="seconds of traffic of all segments together"
    )
    merging.add_argument("reports", type=Path, nargs="+")
    found = parser.parse_args(words)
    if found.command == "run":
        if len(set(found.segments)) != len(found.segments) or min(found.segments) < 0:
            parser.error("segments are different numbers from 0 on")
        if not found.seconds > 0:
            parser.error("a segment takes more than 0 seconds")
    return found


def main() -> int:
    """Run or merge segments."""
    arguments = parse_arguments(sys.argv[1:])
    try:
        passed = run(arguments) if arguments.command == "run" else merge(arguments)
    except traffic.MergeError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

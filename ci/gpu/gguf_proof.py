"""Prove GGUF loading and its kernels in the real engine, each step for itself.

    python gguf_proof.py --plugin-tests TREE/tests --out gguf.json --work /tmp/gguf [--steps …] [--ranks 2]

`products` (about 60 s): the plugin's products, compiled and Triton, against decoded weights; `gguf_products`.

`twin` (100 s): a small `glm-dsa` file of Q8_0, Q4_K, Q6_K, F16 and BF16 tensors and a checkpoint of the
same weights in bf16 score the same text. `language` (100 s): the same with a file of Q8_0 that knows a
language and whose MTP layer drafts. In both the mean absolute difference of log-probabilities is judged apart
for positions that see all keys ("near") and those for which the indexer selects ("far", where rounding
exchanges keys):

- with products of dequantized weights in the place of the plugin's, the file differs from the checkpoint by
  at most 1.5 times as much as the two attention backends do on the checkpoint;
- the plugin's kernels differ from these products by at most 1.5 times as much as the same products of
  activations of 8 bits do;
- one tensor of other weights makes five times the difference of the file (`twin`);
- the checkpoint accepts a tenth of its drafts, and the file half as large a share of its own (`language`);
- the compiled kernels in a compiled model with CUDA graphs, as a server has it, differ from those without by
  at most 1.5 times as much as 8-bit activations make (`language`).

With `--ranks 2` (120 s more for `twin`, 100 s for `language`) the compiled kernels on two GPUs differ from
those on one by at most 1.5 times as much as the checkpoint does, or as 8-bit activations make; the checkpoint
itself differs by at most 1.5 times what 8-bit activations make.

`wide` (220 s): a file with the widths of GLM-5, one dense and four MoE layers of 256 experts (23 GB), is
loaded and timed with both kernels; beside it the same model in bf16 with made-up weights.

`wide-text` (130 s): such a file with two MoE layers (11 GB) scores text. The plugin's kernels are judged as
above; experts that have the weights of others make at least 1.5 times as much as a kernel may. (A simulation
of the file in float32 on a CPU, 1000 tokens: 8-bit activations 0.17, other experts 0.63 near and far, so 2.4
times what a kernel may; bf16 weights that are off by 0.3 % 0.08.)

A step or an engine that fails is reported and the others run. Exits 1 if anything failed or is not as it must
be. The seconds are those of a host whose caches were empty, or reckoned from them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import wheel_files
from comparison import ACCEPTED_SHARE
from engine_runner import host
from gguf_worker import STAND_INS, GgufJob
from logged import run_logged

HERE: Final = Path(__file__).resolve().parent
OURS, NATIVE = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"
ALLOWED_RATIO: Final = 1.5
DAMAGE_RATIO: Final = 5.0
DRAFTS_KEPT: Final = 0.5  # of the share of its drafts that the checkpoint accepts
LENGTHS: Final = (5, 77, 400, 1100, 2300)
INDEX_TOPK: Final = 512
VOCABULARY: Final = 512
JOB_SECONDS: Final = 200.0
SHORTEST_RUN: Final = 20.0
WIDE_LAYERS, WIDE_TEXT_LAYERS, WIDE_EXPERTS = 5, 3, 256
WRONG_EXPERT_RATIO: Final = 1.5
KERNELS: Final = ("bf16", "dequantized", "eight-bit", "compiled", "triton")
STEPS: Final = ("products", "twin", "language", "wide", "wide-text")
Text = list[list[int]]


@dataclass(frozen=True)
class Twins:
    """A file, the checkpoint of the same weights, and text.

    Attributes:
        name: Name of the step.
        path: Path of the file.
        bf16: Folder of the checkpoint.
        text: Prompts of `LENGTHS` tokens.
        damaged: Path of a file in which one tensor has other weights.
        drafted: Tokens that the MTP layer drafts.

    """

    name: str
    path: str
    bf16: str
    text: Text
    damaged: str | None = None
    drafted: int = 0

    def job(self, variant: str) -> GgufJob:
        """Return the job of a variant: what multiplies, then the backend, the number of ranks or graphs."""
        kernels, _, rest = variant.partition("/")
        model = {"bf16": self.bf16, "damaged": self.damaged or ""}.get(kernels, self.path)
        name = f"{self.name}-{variant.replace('/', '-').lower()}"
        kernels = {"bf16": "compiled", "damaged": "dequantized"}.get(kernels, kernels)
        job = GgufJob(name, model, self.bf16, OURS, kernels, drafted=self.drafted)
        if rest.endswith("ranks"):
            return replace(job, ranks=int(rest.removesuffix("ranks")))
        if rest == "graphs":
            return replace(job, graphs=True)
        return replace(job, backend=rest or OURS)


def random_twins(work: Path) -> Twins:
    """Write the model of random weights, and the damaged file."""
    from gguf_checkpoint import proof_config, proof_tensors, write_both

    config = proof_config()
    path, bf16 = map(str, write_both(work / "twin", config, proof_tensors(config)))
    damaged = str(write_both(work / "damaged", config, proof_tensors(config, damage=True))[0])
    generator = random.Random(11)
    text = [[generator.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return Twins("twin", path, bf16, text, damaged)


def language_twins(work: Path) -> Twins:
    """Write the model that knows a language and has an MTP layer."""
    from gguf_checkpoint import write_both
    from gguf_language import language_config, language_tensors
    from small_models import make_text

    tensors, language = language_tensors()
    path, bf16 = map(str, write_both(work / "language", language_config(), tensors))
    text = [make_text(language, length, 11 + length) for length in LENGTHS]
    return Twins("language", path, bf16, text, drafted=1)


class Proof:
    """Runs engines, each in a process of its own, and keeps what they gave."""

    def __init__(self, work: Path, plugin_tests: Path, deadline: float) -> None:
        self.work = work
        self.deadline = deadline
        self.paths = [str(HERE), str(plugin_tests.resolve())]
        self.errors: dict[str, str] = {}
        self.figures: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self._ports = itertools.count(20000, 50)

    def run_script(self, name: str, script: str, argument: Path, variables: dict[str, str]) -> bool:
        """Run a script of this folder in the time that is left; return whether it succeeded."""
        inherited = os.environ.get("PYTHONPATH")
        paths = [*self.paths, *([inherited] if inherited else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "4"} | variables
        started = time.monotonic()
        seconds = min(JOB_SECONDS, self.deadline - started)
        error: str | None = "not started: no time left"
        if seconds >= SHORTEST_RUN:
            command = [sys.executable, str(HERE / script), str(argument)]
            error = run_logged(command, self.work / f"{name}.log", environment, self.work, seconds)
        if error is not None:
            self.errors[name] = error
        print(f"{time.monotonic() - started:6.1f} s  {name}  {error or 'ok'}", flush=True)
        return error is None

    def run(self, jobs: list[GgufJob], text: Text, workers: int) -> None:
        """Run engines, several at a time."""
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda job: self._run(job, text), jobs))

    def _run(self, job: GgufJob, text: Text) -> None:
        base = self.work / f"{job.name}.json"
        base.write_text(json.dumps({"job": asdict(job), "text": text}))
        # Engines of several ranks that start together would else find the same port free.
        variables = {"VLLM_PORT": str(next(self._ports))} if job.ranks > 1 else {}
        if self.run_script(job.name, "gguf_worker.py", base, variables):
            self.figures[job.name] = json.loads(base.with_suffix(".result.json").read_text())
            with np.load(base.with_suffix(".npz")) as arrays:
                self.arrays[job.name] = arrays["prefill"].astype(np.float64)

    def differences(self, one: str, other: str) -> dict[str, float] | None:
        """Return the mean absolute differences of two engines near and far, if both ran."""
        if one not in self.arrays or other not in self.arrays:
            return None
        found = np.abs(self.arrays[one] - self.arrays[other])
        seen = np.concatenate([np.arange(1, length) for length in LENGTHS])
        return {
            "near": float(found[seen <= INDEX_TOPK].mean()),
            "far": float(found[seen > INDEX_TOPK].mean()),
        }


def compare(proof: Proof, twins: Twins, ranks: int) -> dict[str, Any]:
    """Run the engines of one model and return their differences."""
    variants = [*KERNELS, f"bf16/{NATIVE}", f"dequantized/{NATIVE}"]
    variants += ["damaged"] if twins.damaged else []
    variants += ["compiled/graphs"] if twins.drafted else []
    spread = [f"bf16/{ranks}ranks", f"compiled/{ranks}ranks"] if ranks > 1 else []
    proof.run([twins.job(variant) for variant in variants], twins.text, workers=8)
    proof.run([twins.job(variant) for variant in spread], twins.text, workers=2)
    pairs = {
        "backends": ("bf16", f"bf16/{NATIVE}"),
        "dequantized": ("dequantized", "bf16"),
        "dequantized, native": (f"dequantized/{NATIVE}", f"bf16/{NATIVE}"),
        "eight-bit": ("eight-bit", "dequantized"),
        "compiled": ("compiled", "dequantized"),
        "triton": ("triton", "dequantized"),
    }
    if twins.damaged:
        pairs["damaged"] = ("damaged", "bf16")
    if twins.drafted:
        pairs["compiled, graphs"] = ("compiled/graphs", "compiled")
    if spread:
        pairs |= {"bf16, ranks": (spread[0], "bf16"), "compiled, ranks": (spread[1], "compiled")}
    return {
        name: proof.differences(*(twins.job(variant).name for variant in pair))
        for name, pair in pairs.items()
    }


def by_place(found: dict[str, Any]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the differences by place and name, or what was not measured."""
    if missing := [name for name, difference in found.items() if difference is None]:
        return {}, [f"not measured: {', '.join(missing)}"]
    return {place: {name: each[place] for name, each in found.items()} for place in ("near", "far")}, []


def excesses(place: str, size: dict[str, float], bounds: dict[str, float]) -> list[str]:
    """Return what differs by more than a kernel or a backend may."""
    return [
        f"{name} ({place}): {size[name]:.4f} is above {ALLOWED_RATIO} times {bound:.4f}"
        for name, bound in bounds.items()
        if not size[name] <= ALLOWED_RATIO * bound
    ]


def judge(found: dict[str, Any]) -> list[str]:
    """Return what is not as the module's docstring says."""
    places, problems = by_place(found)
    for place, size in places.items():
        bounds = {"dequantized": size["backends"], "dequantized, native": size["backends"]}
        bounds |= dict.fromkeys(("compiled", "triton"), size["eight-bit"])
        if "compiled, graphs" in size:
            bounds["compiled, graphs"] = size["eight-bit"]
        if "compiled, ranks" in size:
            bounds["bf16, ranks"] = size["eight-bit"]
            bounds["compiled, ranks"] = max(size["bf16, ranks"], size["eight-bit"])
        problems += excesses(place, size, bounds)
        if not size.get("damaged", np.inf) >= DAMAGE_RATIO * size["dequantized"]:
            problems.append(f"damage ({place}) makes {size['damaged']:.4f} only")
    return problems


def judge_drafts(proof: Proof, twins: Twins, ranks: int) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return how many drafts engines made and accepted to continue the text, and which accepted too few.

    The engine's steps are reported, too; they are those of the one prompt that accepts fewest.
    """
    spread = [f"{kernels}/{ranks}ranks" for kernels in ("bf16", "compiled")] if ranks > 1 else []
    found: dict[str, dict[str, int]] = {}
    problems: list[str] = []
    least = ACCEPTED_SHARE
    for variant in ["bf16", "dequantized", "compiled", "triton", "compiled/graphs", *spread]:
        figures = proof.figures.get(twins.job(variant).name)
        if figures is None:
            problems.append(f"{variant}: no drafts")
            continue
        found[variant] = {"steps": figures["continued"]["steps"]} | figures["continued"]["drafts"]
        drafted, accepted = (found[variant][kind] for kind in ("drafted", "accepted"))
        if not accepted >= least * drafted > 0:
            problems.append(f"{variant}: {accepted} of {drafted} drafts accepted, below {least:.0%}")
        elif variant == "bf16":
            least = max(least, DRAFTS_KEPT * accepted / drafted)
    return found, problems


def run_twins(proof: Proof, twins: Twins, ranks: int) -> dict[str, Any]:
    """Compare one model's engines and judge them."""
    found = compare(proof, twins, ranks)
    report: dict[str, Any] = {"differences": found, "problems": judge(found)}
    if twins.drafted:
        report["drafts"], problems = judge_drafts(proof, twins, ranks)
        report["problems"] += problems
    return report


def run_products(proof: Proof) -> dict[str, Any]:
    """Compare the products."""
    path = proof.work / "products.json"
    proof.run_script("products", "gguf_products.py", path, {})
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"problems": ["no report"]}
    return report


def write_wide_file(proof: Proof, name: str, layers: int) -> tuple[str, str, Text]:
    """Write a file with the widths of GLM-5; return its path, its folder and text to score."""
    from gguf_wide import wide_config, write_wide

    folder = proof.work / name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    config = wide_config(layers, WIDE_EXPERTS)
    path = str(write_wide(folder, config))
    print(f"{time.monotonic() - started:6.1f} s  wrote {Path(path).stat().st_size / 1e9:.1f} GB", flush=True)
    vocabulary = config.vocab_size
    text = [[(31 * i + n) % vocabulary for i in range(length)] for n, length in enumerate(LENGTHS)]
    return path, str(folder), text


def run_wide(proof: Proof) -> dict[str, Any]:
    """Write the wide file, load it and time it."""
    path, folder, text = write_wide_file(proof, "wide", WIDE_LAYERS)
    jobs = [
        GgufJob("wide-compiled", path, folder, OURS, timed=True),
        GgufJob("wide-bf16", folder, folder, OURS, timed=True, dummy=True),
        GgufJob("wide-triton", path, folder, OURS, kernels="triton", timed=True),
    ]
    proof.run(jobs, text, workers=1)
    found = {
        job.name: {key: proof.figures[job.name][key] for key in ("start_seconds", "decode")}
        for job in jobs
        if job.name in proof.figures
    }
    missing = [f"{job.name} failed" for job in jobs if job.name not in found]
    return {"engines": found, "problems": missing}


def run_wide_text(proof: Proof) -> dict[str, Any]:
    """Compare engines on a wide file."""
    path, folder, text = write_wide_file(proof, "wide-text", WIDE_TEXT_LAYERS)
    names = {kernels: f"wide-text-{kernels}" for kernels in (*STAND_INS, "compiled", "triton")}
    jobs = [GgufJob(name, path, folder, OURS, kernels) for kernels, name in names.items()]
    proof.run(jobs, text, workers=len(jobs))
    exact = names.pop("dequantized")
    found = {kernels: proof.differences(name, exact) for kernels, name in names.items()}
    return {"differences": found, "problems": judge_wide_text(found)}


def judge_wide_text(found: dict[str, Any]) -> list[str]:
    """Return what is not as the module's docstring says."""
    places, problems = by_place(found)
    for place, size in places.items():
        problems += excesses(place, size, dict.fromkeys(("compiled", "triton"), size["eight-bit"]))
        if not size["wrong-expert"] >= WRONG_EXPERT_RATIO * ALLOWED_RATIO * size["eight-bit"]:
            problems.append(f"wrong experts ({place}) make {size['wrong-expert']:.4f} only")
    return problems


def run_step(proof: Proof, step: str, ranks: int) -> dict[str, Any]:
    """Run one step; what it raises is its result."""
    started = time.monotonic()
    try:
        if step == "products":
            report = run_products(proof)
        elif step == "wide":
            report = run_wide(proof)
        elif step == "wide-text":
            report = run_wide_text(proof)
        else:
            write = random_twins if step == "twin" else language_twins
            report = run_twins(proof, write(proof.work), ranks)
    except Exception:  # noqa: BLE001 - the other steps go on
        traceback.print_exc()
        report = {"problems": [traceback.format_exc()]}
    return report | {"seconds": time.monotonic() - started}


def describe_plugin(wheel: Path) -> dict[str, str]:
    """Return which plugin is proven: its wheel, the stack of that, and the compiled kernels in use.

    Raises:
        ModuleNotFoundError: The plugin is not installed.

    """
    spec = find_spec("vllm_gguf_plugin")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm_gguf_plugin is not installed in this environment")
    with zipfile.ZipFile(wheel) as archive:
        return {
            "wheel": wheel.name,
            "wheel_sha256": wheel_files.file_sha256(wheel),
            "stack_id": wheel_files.stack_id(archive),
            "kernels_sha256": wheel_files.file_sha256(Path(spec.origin).with_name("_C_gguf.abi3.so")),
        }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plugin-tests", type=Path, required=True, help="tests of the patched plugin")
    parser.add_argument("--out", type=Path, required=True, help="report to write (JSON)")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and logs")
    parser.add_argument("--files", type=Path, help="manifest that wheel_files.py install wrote")
    parser.add_argument("--plugin", type=Path, help="wheel of the plugin that is installed")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the host to use")
    parser.add_argument("--seconds", type=float, default=540, help="time for everything")
    return parser.parse_args()


def main() -> int:
    """Run everything and write the report, which is written again after each step."""
    arguments = parse_arguments()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(HERE), str(arguments.plugin_tests.resolve())]
    proof = Proof(work, arguments.plugin_tests, time.monotonic() + arguments.seconds)
    report: dict[str, Any] = {"schema": 2, "passed": False}
    report["wheel_files"] = json.loads(arguments.files.read_text()) if arguments.files else None
    report["plugin"] = describe_plugin(arguments.plugin) if arguments.plugin else None
    for step in arguments.steps:
        report[step] = run_step(proof, step, arguments.ranks)
        report |= {"errors": proof.errors, "jobs": proof.figures}
        arguments.out.write_text(json.dumps(report, indent=1))
        print(
            step, json.dumps({k: v for k, v in report[step].items() if k != "products"}, indent=1), flush=True
        )
    report["host"] = host(work, reuse=False)
    report["passed"] = not proof.errors and not any(report[step]["problems"] for step in arguments.steps)
    report["result"] = "passed" if report["passed"] else "FAILED"
    arguments.out.write_text(json.dumps(report, indent=1))
    print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

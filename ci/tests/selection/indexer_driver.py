"""Ask vLLM which implementation computes the indexer's logits on one chip, in many states of the machine.

``python indexer_driver.py CAPABILITY FOLDER``: each line of the standard input is a JSON list of objects
with the fields of :class:`State`, each line of the standard output a JSON list of :class:`Answer` in the
same order. DeepGEMM's kernels cannot be called without a GPU: they are taken to work, so that what
decides is what vLLM finds out before.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kernelcheck.chips import chip
from kernelcheck.platform import pretend

FOREIGN_KERNELS = ("sm90_fp8_mqa_logits", "sm90_fp8_paged_mqa_logits", "sm100_fp8_mqa_logits")
"""What releases of DeepGEMM before it knew SM120 have, as far as vLLM looks."""


@dataclass(frozen=True, slots=True)
class State:
    """What a machine has."""

    deep_gemm: str
    """``absent``, ``vendored``, or ``foreign``: an installed package beside the vendored one."""
    compiler: bool
    requested: str = "auto"


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM made of it."""

    backend: str | None
    reason: str
    warnings: list[str]
    lines: list[str]
    """What it logged about the logits, without warnings."""
    module: str | None = None
    """The DeepGEMM that would be called, None where none is."""
    linear: bool = False
    """Whether FP8 linear and MoE layers count on DeepGEMM."""
    mx_scales: bool = False
    max_logits_mb: int = 0


class Machine:
    """The process, in one state after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.support: Any = importlib.import_module("vllm.utils.deep_gemm_support")
        self.deep_gemm: Any = importlib.import_module("vllm.utils.deep_gemm")
        self.imports: Any = importlib.import_module("vllm.utils.import_utils")
        self.backend: Any = importlib.import_module("vllm.utils.mqa_logits_backend")
        self.indexer: Any = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
        self.vendored = self.support.VENDORED_DEEP_GEMM
        self.warnings: list[str] = []
        self.lines: list[str] = []
        self.called: str | None = None
        self._install("foreign", FOREIGN_KERNELS)
        nvcc = folder / "toolkit" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.touch(mode=0o755)

    def _install(self, name: str, kernels: tuple[str, ...]) -> None:
        impls = self.folder / name / "deep_gemm" / "include" / "deep_gemm" / "impls"
        impls.mkdir(parents=True)
        (self.folder / name / "deep_gemm" / "__init__.py").touch()
        for kernel in kernels:
            (impls / f"{kernel}.cuh").touch()

    def _probe(self) -> None:
        self.called = self.deep_gemm._import_deep_gemm().__name__

    def answer(self, state: State) -> Answer:
        """Put the process into a state and ask."""
        self._enter(state)
        self.called = None
        try:
            choice = self.backend.get_mqa_logits_choice()
            backend, reason = choice.backend.value, choice.reason
        except RuntimeError as error:
            return Answer(None, str(error), self.warnings, self.lines)
        return Answer(
            backend=backend,
            reason=reason,
            warnings=self.warnings,
            lines=self.lines,
            module=self.called,
            linear=self.deep_gemm.is_deep_gemm_supported(),
            mx_scales=self.deep_gemm.mqa_logits_use_mx_scales(),
            max_logits_mb=self.indexer.get_max_logits_bytes() >> 20,
        )

    def _enter(self, state: State) -> None:
        for cached in (
            self.support.deep_gemm_module_names,
            self.deep_gemm._import_deep_gemm,
            self.deep_gemm.is_deep_gemm_supported,
            self.deep_gemm.mqa_logits_use_mx_scales,
            self.imports._has_module,
            self.backend.get_mqa_logits_choice,
        ):
            cached.cache_clear()
        foreign = str(self.folder / "foreign")
        sys.path[:] = [foreign] * (state.deep_gemm == "foreign") + [p for p in sys.path if p != foreign]
        sys.modules.pop("deep_gemm", None)
        importlib.invalidate_caches()
        absent = state.deep_gemm == "absent"
        self.support.VENDORED_DEEP_GEMM = "no_such_module" if absent else self.vendored
        default = self.folder / ("toolkit" if state.compiler else "none")
        self.support._DEFAULT_CUDA_HOME = str(default)
        os.environ["VLLM_SPARSE_INDEXER_LOGITS_BACKEND"] = state.requested
        self.backend._failure_of_probe = self._probe
        self.warnings, self.lines = [], []


class Keep(logging.Handler):
    """Keeps the warnings of a machine, and what it says of the logits."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(logging.INFO)
        self.machine = machine

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.machine.warnings.append(message)
        elif "indexer logits" in message:
            self.machine.lines.append(message)


def _take_standard_output() -> TextIO:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main(capability: str, folder: str) -> None:
    """Answer lists of states until the input ends."""
    answers = _take_standard_output()
    pretend(chip(int(capability)))
    os.environ["PATH"] = ""
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "DG_JIT_USE_NVRTC"):
        os.environ.pop(name, None)
    machine = Machine(Path(folder))
    logger = logging.getLogger("vllm")
    logger.setLevel(logging.INFO)  # as vLLM configures it where it serves
    logger.addHandler(Keep(machine))
    for line in sys.stdin:
        told = [asdict(machine.answer(State(**fields))) for fields in json.loads(line)]
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

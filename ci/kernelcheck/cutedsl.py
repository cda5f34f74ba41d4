"""Compile what a launcher launches in CuTeDSL for chips that are not there, and measure the result.

The package nvidia-cutlass-dsl has an assembler of its own and compiles for the architecture that its
environment names, without a driver. :func:`compile_cases` starts a process for each chip, which sees the
package, though the tests' own environment does not: `ci/test` installs it aside.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from kernelcheck.chips import CHIPS, chip
from kernelcheck.processes import compiling_environment, run_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernelcheck.chips import Chip

PACKAGES: Final = Path(sys.prefix) / "cutedsl"
"""Where `ci/test` installs the package, which the environment of the tests does not have."""

REGISTERS: Final = 64 * 1024
"""Registers of one SM, all of which a block may have."""

_ENTRY: Final = re.compile(r"\.visible \.entry (\w+)\(")
_THREADS: Final = re.compile(r"\.reqntid (\d+), (\d+), (\d+)")
_TARGET: Final = re.compile(r"\.target (\w+)")


@dataclass(frozen=True, slots=True)
class Built:
    """What one kernel needs on one chip."""

    case: str
    """What was called: the caller's name for it."""
    compiler: str
    """``cutedsl``, or ``triton`` for what a launcher launches beside it."""
    kernel: str
    capability: int
    threads: int
    """Of a block."""
    registers: int
    """Per thread."""
    local_memory: int
    """Per thread: spilled registers and stack, in bytes."""

    @property
    def fits(self) -> bool:
        """Whether a block can be launched, and nothing spills."""
        return self.threads * self.registers <= REGISTERS and not self.local_memory


def architecture(target: Chip) -> str:
    """Return the compile target that CuTeDSL chooses on a chip from SM90 on."""
    return f"sm_{target.capability}a"


def _of_cutedsl(case: str, target: Chip, artifacts: Any) -> Built:
    from kernelcheck import aot

    found = [pattern.findall(artifacts.PTX) for pattern in (_ENTRY, _THREADS, _TARGET)]
    (kernel,), (threads,), (compiled_for,) = found
    if compiled_for != architecture(target):
        raise ValueError(f"compiled for {compiled_for} instead of {architecture(target)}")
    x, y, z = map(int, threads)
    return Built(case, "cutedsl", kernel, target.capability, x * y * z, *aot.resource_usage(artifacts.CUBIN))


def _of_triton(case: str, launch: Any) -> Built:
    from kernelcheck import aot

    figures = aot.measure(launch, case)
    if figures.registers is None or figures.local_memory is None:
        raise RuntimeError(f"{case}: {figures.kernel}: {figures.error}")
    threads = 32 * figures.num_warps
    usage = figures.registers, figures.local_memory
    return Built(case, "triton", figures.kernel, figures.capability, threads, *usage)


def build(case: str, call: Callable[[], object], target: Chip) -> list[Built]:
    """Call product code and return what it compiles in CuTeDSL and launches in Triton, launching nothing.

    Args:
        case: The caller's name for it.
        call: Calls a launcher, on tensors of this machine.
        target: The chip, which the process's environment and its platform describe.

    Raises:
        Exception: Whatever ``call`` or one of the compilers raises.
    """
    from kernelcheck import aot

    cute = import_module("cutlass.cute")
    compiled: list[Built] = []
    compile_kernel = cute.compile

    def keep(*arguments: Any, **options: Any) -> Callable[..., None]:
        compiled.append(_of_cutedsl(case, target, compile_kernel(*arguments, **options).artifacts))
        return lambda *_, **__: None

    with patch.object(cute, "compile", keep):
        launches = aot.record(target, call)
    return compiled + [_of_triton(case, launch) for launch in launches]


def _environment(target: Chip, dump: Path) -> dict[str, str]:
    # pip runs no .pth file in such a folder.
    environment = compiling_environment([PACKAGES, PACKAGES / "nvidia_cutlass_dsl" / "dsl_packages"])
    return environment | {
        "CUTE_DSL_ARCH": architecture(target),
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }


def _compile_for(cases: str, capability: int) -> list[Built]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "built.json")
        command = [sys.executable, "-m", "kernelcheck.cutedsl", cases]
        command += ["--chip", str(capability), "--json", str(report)]
        run_compiling(command, _environment(chip(capability), Path(folder)))
        return [Built(**each) for each in json.loads(report.read_text())]


def compile_cases(cases: str, capabilities: Iterable[int], *, jobs: int = 2) -> list[Built]:
    """Compile ``cases`` for each chip, each in a process of its own.

    Args:
        cases: ``MODULE:FUNCTION``; it yields (name, call), and each call launches.
        capabilities: Chips from SM90 on.
        jobs: Processes at a time.

    Raises:
        CompileProcessError: A process failed, which a kernel that does not compile makes it do.
    """
    with ThreadPoolExecutor(jobs) as pool:
        return [each for built in pool.map(lambda c: _compile_for(cases, c), capabilities) for each in built]


def main(arguments: list[str] | None = None) -> int:
    """Compile for one chip in this process, which :func:`compile_cases` has made ready for it."""
    from kernelcheck import platform

    parser = argparse.ArgumentParser(prog="python -m kernelcheck.cutedsl")
    parser.add_argument("cases")
    parser.add_argument("--chip", type=int, choices=CHIPS, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    target = chip(options.chip)
    platform.pretend(target)
    module, _, function = options.cases.partition(":")
    cases = getattr(import_module(module), function)
    built = [asdict(each) for name, call in cases() for each in build(name, call, target)]
    options.json.write_text(json.dumps(built))
    return 0


if __name__ == "__main__":
    sys.exit(main())

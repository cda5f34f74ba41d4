"""Start processes in which Triton compiles, whatever the process of the tests does.

``python -m kernelcheck.processes --help`` does the same by hand, to keep figures as a file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernelcheck.chips import CHIPS
from kernelcheck.figures import Figures, read_figures, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


TRITON_36: Final = Path(sys.prefix) / "triton36"
"""An older Triton, which `ci/test` installs beside the environment's own."""


class CompileProcessError(RuntimeError):
    """A compiling process failed; the message holds what it printed."""


def compiling_environment(import_first: Iterable[Path] = ()) -> dict[str, str]:
    """Return this process's environment, changed so that Triton compiles and sees no GPU.

    Args:
        import_first: Folders that win over installed packages: another Triton, another vLLM.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    own = Path(__file__).resolve().parent.parent
    inherited = environment.get("PYTHONPATH")
    paths = [*map(str, import_first), str(own), *([inherited] if inherited else [])]
    return environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}


def run_compiling(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a process that compiles. CompileProcessError, with what it printed, when it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = done.stdout + done.stderr
        raise CompileProcessError(f"{' '.join(command)} gave {done.returncode}:\n{printed}")


def _compile_for(cases: str, capability: int, environment: Mapping[str, str], *, vllm: bool) -> list[Figures]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "figures.json")
        command = [sys.executable, "-m", "kernelcheck", cases]
        command += ["--chip", str(capability), "--json", str(report)]
        command += [] if vllm else ["--no-vllm"]
        run_compiling(command, environment)
        return read_figures(report)


def compile_cases(
    cases: str,
    capabilities: Iterable[int],
    *,
    import_first: Iterable[Path] = (),
    vllm: bool = True,
    jobs: int = 2,
) -> list[Figures]:
    """Compile ``cases`` for each chip, each in a process that has never seen another chip.

    Args:
        cases: ``MODULE:FUNCTION``, see ``python -m kernelcheck --help``.
        capabilities: Chips, such as 90 and 120.
        import_first: Folders that win over installed packages.
        vllm: Whether to make vLLM believe in the chip first.
        jobs: Processes at a time.

    Returns:
        One record per launch and chip, ordered by case, kernel and chip.

    Raises:
        CompileProcessError: A process failed. A kernel that does not compile is no such failure.
    """
    environment = compiling_environment(import_first)
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda c: _compile_for(cases, c, environment, vllm=vllm), capabilities)
        every = [figures for run in runs for figures in run]
    return sorted(every, key=lambda f: (f.case, f.kernel, f.capability, f.constexprs))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kernelcheck.processes",
        description="Compile cases for several chips and keep what the kernels need as JSON.",
        epilog="example: python -m kernelcheck.processes tests.runtime.kernels.mla_decode_cases:every_case"
        " --chips 90 120 --json figures.json",
    )
    parser.add_argument("cases", help="MODULE:FUNCTION, see python -m kernelcheck --help")
    parser.add_argument("--chips", type=int, nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument(
        "--import-first", type=Path, nargs="*", default=[], help="folders that win, as PYTHONPATH"
    )
    options = parser.parse_args(arguments)
    figures = compile_cases(options.cases, options.chips, import_first=options.import_first)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(render(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compile what a launcher launches for chips that are not there, and measure the result.

:func:`record` calls product code on meta tensors under a stand-in driver. Triton itself then
specialises the arguments (divisibility by 16, equality with 1, constexprs, options) exactly as on a
GPU, and hands every kernel to a hook before compiling it. :func:`measure` compiles such a launch
for the chip and reads shared memory from Triton, registers and local memory from the cubin.

Both need Triton to compile in this process, and vLLM's launchers need
:func:`kernelcheck.platform.pretend` before; :mod:`kernelcheck.processes` starts such processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from kernelcheck.figures import Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kernelcheck.chips import Chip

_RESOURCES: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Launch:
    """One kernel as the product's launcher asked for it, specialised by Triton for a chip."""

    kernel: Any
    """The ``triton.JITFunction``."""
    signature: Mapping[str, Any]
    """Triton type of every parameter, ``constexpr`` for compile-time ones."""
    constants: Mapping[tuple[int, ...], Any]
    """Values of constexprs, and of integers that were specialised to 1."""
    attributes: Mapping[tuple[int, ...], Any]
    """``tt.divisibility`` and the like, by parameter position."""
    options: Mapping[str, Any]
    """Compile options: ``num_warps``, ``num_stages``, …"""
    chip: Chip

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return str(self.kernel.fn.__name__)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Compile-time constants by parameter name, in the order of the parameters."""
        names = list(self.signature)
        return {names[path[0]]: value for path, value in sorted(self.constants.items())}


class _DeviceProperties:
    """The part of a driver's ``utils`` that product code and Triton ask before a launch."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._chip.shared_memory,
            "multiprocessor_count": self._chip.compute_units,
            "warpSize": 32,
        }


class StandInDriver(DriverBase):  # type: ignore[misc]
    """A Triton driver that describes ``chip`` and cannot launch anything."""

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self._chip = chip
        self.utils = _DeviceProperties(chip)

    @classmethod
    def is_active(cls) -> bool:
        """Report that no device backs this driver, so that Triton never picks it by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: only a launch needs it."""
        raise NotImplementedError("the stand-in driver launches nothing")

    def get_current_target(self) -> Any:
        """Return the compile target of the chip."""
        return GPUTarget("cuda", self._chip.capability, 32)

    def get_current_device(self) -> int:
        """Return the capability as device number, so that Triton's caches keep chips apart."""
        return self._chip.capability

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Return the meta device, on which recorded launches have their tensors."""
        import torch

        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        """Refuse: record the configurations of an autotuned kernel one by one instead."""
        raise NotImplementedError("nothing can be timed without a GPU")


@contextmanager
def _hook(hook: Callable[..., bool]) -> Iterator[None]:
    """Install a hook that Triton calls before it compiles; True makes it not compile."""
    previous = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = previous


def record(chip: Chip, call: Callable[[], object]) -> list[Launch]:
    """Call product code and return what it would have launched on ``chip``, in order.

    Args:
        chip: Described to Triton and to code that asks Triton's driver.
        call: Calls a launcher, on meta tensors (or torch's fake ones).

    Raises:
        RuntimeError: Triton interprets in this process.
        Exception: Whatever ``call`` raises.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: compile in a process of its own")
    launches: list[Launch] = []

    def keep(*, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        (attributes,) = compile["configs"]
        kernel, signature, constants = fn.jit_function, compile["signature"], compile["constants"]
        launches.append(Launch(kernel, signature, constants, attributes, options, chip))
        return True

    driver.set_active(StandInDriver(chip))
    with _hook(keep), warnings.catch_warnings():
        # Alignment of a fake tensor is read from its data pointer, which torch warns about.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        call()
    return launches


def _options(launch: Launch) -> dict[str, Any]:
    """Return the options to compile with; JSON has turned their tuples into lists."""
    pairs = launch.options.items()
    return {name: tuple(v) if isinstance(v, list) else v for name, v in pairs}


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread of the kernel in ``cubin``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usages = _RESOURCES.findall(text)
    if len(usages) != 1:
        raise ValueError(f"expected one kernel in the cubin, got {usages} from:\n{text}")
    registers, stack, local = map(int, usages[0])
    return registers, stack + local


def _reason(error: BaseException) -> str:
    """Return the one line that says why a compile failed, without positions or temporary paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    fatal = [line for line in lines if re.match(r"ptxas\S* (fatal|error)", line)]
    return f"{type(error).__name__}: {(fatal or lines[-1:])[0]}"


def _figures(
    case: str,
    launch: Launch,
    *,
    shared: int | None = None,
    usage: tuple[int | None, int | None] = (None, None),
    tensor_memory: int | None = None,
    error: str | None = None,
) -> Figures:
    names = list(launch.signature)
    aligned = [
        names[path[0]]
        for path, attributes in sorted(launch.attributes.items())
        if ["tt.divisibility", 16] in attributes
    ]
    return Figures(
        case=case,
        kernel=launch.name,
        capability=launch.chip.capability,
        triton=triton.__version__,
        constexprs=tuple((name, str(value)) for name, value in launch.constexprs.items()),
        divisible_by_16=tuple(aligned),
        num_warps=launch.options["num_warps"],
        num_stages=launch.options["num_stages"],
        shared_memory=shared,
        shared_memory_limit=launch.chip.shared_memory,
        registers=usage[0],
        local_memory=usage[1],
        tensor_memory=tensor_memory,
        error=error,
    )


def measure(launch: Launch, case: str = "") -> Figures:
    """Compile ``launch`` for its chip (cached by Triton) and return what it needs.

    Args:
        launch: From :func:`record`.
        case: The caller's name for it, kept in the figures.

    A kernel that Triton or ptxas refuses gives figures with :attr:`Figures.error`.
    """
    source = triton.compiler.ASTSource(
        launch.kernel, launch.signature, dict(launch.constants), dict(launch.attributes)
    )
    target = GPUTarget("cuda", launch.chip.capability, 32)
    compile_errors = (
        triton.compiler.CompilationError,
        triton.runtime.errors.PTXASError,
        RuntimeError,
    )
    try:
        with redirect_stdout(sys.stderr):  # Triton prints the whole PTX when ptxas refuses it.
            built = triton.compile(source, target=target, options=_options(launch))
    except compile_errors as error:
        return _figures(case, launch, error=_reason(error))
    return _figures(
        case,
        launch,
        shared=built.metadata.shared,
        usage=resource_usage(built.asm["cubin"]),
        tensor_memory=getattr(built.metadata, "tmem_size", None),
    )

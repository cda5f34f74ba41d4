"""Make vLLM believe that a certain chip is present, without changing any of its decisions.

:func:`pretend` installs a subclass of vLLM's own CUDA platform that overrides the queries of the
device and nothing else. vLLM's priorities, validators, selection and launchers then run as they
are. It has to come before every other import of vLLM, because some modules ask the platform while
they are imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kernelcheck import native

if TYPE_CHECKING:
    from kernelcheck.chips import Chip

_CACHE_VARIABLE: Final = "KERNELCHECK_CACHE"
_ALLOWED_BEFORE: Final = ("vllm.platforms", "vllm.envs", "vllm.version", "vllm._version")


def cache_folder() -> Path:
    """Return where stubs are kept: ``$KERNELCHECK_CACHE``, else a folder of this user's."""
    default = Path(tempfile.gettempdir(), f"kernelcheck-{os.getuid()}")
    return Path(os.environ.get(_CACHE_VARIABLE) or default)


def vllm_folder() -> Path:
    """Return the folder of the ``vllm`` package that would be imported, without importing it.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed in this environment")
    return Path(spec.origin).parent


def skip_package_init(package: str) -> None:
    """Let modules of a package of vLLM be imported without what its ``__init__`` imports.

    ``vllm.models.glm5next`` imports its image processor, which needs torchvision; its kernels do not.
    Changes nothing if the package is loaded.
    """
    if package not in sys.modules:
        bare = ModuleType(package)
        bare.__path__ = [str(vllm_folder().joinpath(*package.split(".")[1:]))]
        sys.modules[package] = bare


def _platform_class(base: type, chip: Chip, capability: object) -> type:
    """Derive the platform: each method returns what a query of ``chip`` would give."""
    answers: dict[str, object] = {
        "get_device_capability": capability,
        "get_device_name": chip.name,
        "get_device_uuid": f"GPU-kernelcheck-{chip.capability}",
        "get_device_total_memory": chip.total_memory,
        "num_compute_units": chip.compute_units,
        "is_integrated_gpu": chip.integrated,
        "is_fully_connected": False,
        "device_count": 1,
        "get_cuda_runtime_major": 13,
    }

    def query(answer: object) -> object:
        return classmethod(lambda cls, *args, **kwargs: answer)

    return type(f"Pretend{base.__name__}", (base,), {k: query(v) for k, v in answers.items()})


def _answer_torch_queries(chip: Chip) -> None:
    """Let ``torch.cuda`` describe ``chip`` too: kernels and libraries ask it directly."""
    import torch

    properties = SimpleNamespace(
        name=chip.name,
        major=chip.major,
        minor=chip.minor,
        total_memory=chip.total_memory,
        multi_processor_count=chip.compute_units,
        shared_memory_per_block_optin=chip.shared_memory,
        is_integrated=chip.integrated,
        warp_size=32,
    )
    queries: dict[str, Any] = {
        "get_device_capability": lambda *_: (chip.major, chip.minor),
        "get_device_name": lambda *_: chip.name,
        "get_device_properties": lambda *_: properties,
        "current_device": lambda: 0,
    }
    for name, answer in queries.items():
        setattr(torch.cuda, name, answer)


def _refuse_late_call() -> None:
    loaded = sorted(
        name for name in sys.modules if name.startswith("vllm.") and not name.startswith(_ALLOWED_BEFORE)
    )
    if loaded:
        raise RuntimeError(f"pretend() must come before other imports of vLLM: {loaded[:5]}")


def pretend(chip: Chip) -> Any:
    """Make ``vllm.platforms.current_platform`` a CUDA platform on ``chip``; call it once, first.

    Args:
        chip: What every device query answers.

    Returns:
        The platform object.

    Raises:
        RuntimeError: Other modules of vLLM are loaded already, or ``CUDA_VISIBLE_DEVICES`` is not
            empty, with which vLLM finds no Triton driver and replaces kernels by placeholders.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise RuntimeError('set CUDA_VISIBLE_DEVICES="" before the process imports vLLM')
    _refuse_late_call()
    import_module("torch")
    if "libcudart.so.13" in native.load_stubs(vllm_folder(), cache_folder()):
        native.set_attribute(native.MAX_SHARED_MEMORY_OPTIN, chip.shared_memory)
    _answer_torch_queries(chip)
    platforms: Any = import_module("vllm.platforms")
    interface = import_module("vllm.platforms.interface")
    base = import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    if platforms._current_platform is not None:
        raise RuntimeError("importing vllm.platforms.cuda has already chosen a platform")
    capability = interface.DeviceCapability(chip.major, chip.minor)
    platforms._current_platform = _platform_class(base, chip, capability)()
    return platforms._current_platform

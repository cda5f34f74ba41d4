"""Load the stack's kernels with or without an installed vLLM.

A GPU host without a network has torch and Triton but no vLLM. The kernel file needs little of
vLLM: the JIT warm-up machinery, which is loaded from the same checkout, and a handful of names,
which get the smallest stand-ins that behave alike.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

KERNEL = "vllm.v1.attention.ops.triton_mla_sparse"
DECODE = "vllm.v1.attention.ops.triton_decode_attention"
LOGITS = "vllm.v1.attention.ops.triton_mqa_logits"
WRAPPERS = ("_SPLIT_KERNEL", "_FP8_SPLIT_KERNEL", "_MERGE_KERNEL")
"""Names of the sparse-MLA kernels' wrappers in their module."""
_REAL_MODULES = (
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.v1.attention.ops.fp8_e4m3",
)
CARRIED_FILES = tuple(name.replace(".", "/") + ".py" for name in (*_REAL_MODULES, KERNEL, DECODE, LOGITS))


def load_kernel(root: Path | None = None) -> types.ModuleType:
    """Import the kernel module.

    Args:
        root: Directory that holds at least `CARRIED_FILES`; None imports the installed vLLM.

    Returns:
        The module ``vllm.v1.attention.ops.triton_mla_sparse``.

    """
    if root is None:
        return importlib.import_module(KERNEL)
    _install_stand_ins()
    for name in _REAL_MODULES:
        _load_file(name, root)
    return _load_file(KERNEL, root)


def sha256_of(module: types.ModuleType) -> str:
    """Return the hash of a loaded kernel's file, to say in a report what was measured."""
    assert module.__file__ is not None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def measured_on() -> dict[str, object]:
    """Return what heads every report: its schema, the GPU, and the versions of PyTorch and Triton."""
    import torch  # processes that only compile do without

    return {
        "schema": 1,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": sys.modules["triton"].__version__,
    }


def record_launches(wrapper: Any, launched: set[Any]) -> None:
    """Have a kernel's wrapper put the variant of every launch into ``launched``."""
    original = wrapper.launch

    def launch(spec: Any, inputs: Any) -> Any:
        launched.add(inputs["compile_key"])
        return original(spec, inputs)

    wrapper.launch = launch


def load_logits_kernel(root: Path | None = None) -> types.ModuleType:
    """Import the indexer's logits kernels, ``vllm.v1.attention.ops.triton_mqa_logits``."""
    if root is None:
        return importlib.import_module(LOGITS)
    load_kernel(root)
    return _load_file(LOGITS, root)


def load_decode_kernel(root: Path | None = None) -> types.ModuleType:
    """Import upstream's Triton decode kernel, the page-size-1 baseline (after `load_kernel`)."""
    return importlib.import_module(DECODE) if root is None else _load_file(DECODE, root)


def _load_file(name: str, root: Path) -> types.ModuleType:
    path = root / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str, **members: object) -> types.ModuleType:
    """Register a stand-in module and the packages above it."""
    parent, _, leaf = name.rpartition(".")
    if parent and parent not in sys.modules:
        _module(parent)
    module = types.ModuleType(name)
    module.__path__ = []
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


class _Platform:
    device_type = "cuda"

    def is_cuda(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    def get_device_capability(self, device_id: int = 0) -> object:
        import torch

        major, minor = torch.cuda.get_device_capability(device_id)
        return types.SimpleNamespace(major=major, minor=minor)


def _num_compute_units(device_id: int = 0) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device_id).multi_processor_count)


def _max_shared_memory(device_id: int = 0) -> int:
    import torch

    properties = torch.cuda.get_device_properties(device_id)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _install_stand_ins() -> None:
    import triton
    import triton.language as tl

    envs = _module("vllm.envs", VLLM_TRITON_JIT_WARMUP_NUM_THREADS=1)
    sys.modules["vllm"].envs = envs  # type: ignore[attr-defined]
    _module("vllm.platforms", current_platform=_Platform())
    _module(
        "vllm.triton_utils",
        HAS_TRITON=True,
        triton=triton,
        tl=tl,
        LOG2E=math.log2(math.e),
        LOGE2=math.log(2.0),
    )
    _module(
        "vllm.utils.math_utils",
        cdiv=_cdiv,
        next_power_of_2=lambda n: 1 if n < 1 else 1 << (n - 1).bit_length(),
        round_up=lambda n, multiple: _cdiv(n, multiple) * multiple,
    )
    _module("vllm.utils.mem_utils", get_max_shared_memory_bytes=_max_shared_memory)
    _module("vllm.utils.platform_utils", num_compute_units=_num_compute_units)
    for package in ("vllm.model_executor.warmup", "vllm.v1.attention.ops"):
        _module(package)

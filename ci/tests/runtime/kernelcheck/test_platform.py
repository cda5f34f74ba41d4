"""The pretended platform and the stub libraries, each in a fresh process as they demand."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernelcheck import native
from kernelcheck.chips import CHIPS, Chip
from kernelcheck.processes import compiling_environment

if TYPE_CHECKING:
    from pathlib import Path

# Namespaces of the official wheel's operators; two more hold helpers of DeepGEMM and DeepSelect.
OPERATORS = {
    "_C": 111,
    "_C_cache_ops": 19,
    "_C_cuda_utils": 2,
    "_C_custom_ar": 15,
    "_flashkda_C": 2,
    "_flashmla_C": 8,
    "_flashmla_extension_C": 2,
    "_moe_C": 18,
    "_qutlass_C": 9,
    "_vllm_fa2_C": 4,
    "_vllm_fa3_C": 2,
}

LOAD_ALL = """
import importlib, json, sys
from collections import Counter
from kernelcheck import native, platform
from kernelcheck.chips import chip
platform.pretend(chip(120))
import torch
root = platform.vllm_folder()
modules = native.native_modules(root)
for module in modules:
    name = module.relative_to(root.parent).as_posix().partition(".")[0].replace("/", ".")
    importlib.import_module(name)
counts = Counter(name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names())
print(json.dumps({"modules": len(modules), "operators": counts}))
"""

DESCRIBE = """
import json, sys
from kernelcheck import platform
from kernelcheck.chips import chip
platform.pretend(chip(int(sys.argv[1])))
from vllm.platforms import current_platform as p
from vllm.platforms.cuda import NonNvmlCudaPlatform
import torch
from vllm.utils.platform_utils import num_compute_units
from vllm.triton_utils import HAS_TRITON
capability = p.get_device_capability()
print(json.dumps({
    "capability": capability.major * 10 + capability.minor,
    "name": p.get_device_name(),
    "shared_memory": torch.cuda.get_device_properties(0).shared_memory_per_block_optin,
    "compute_units": num_compute_units(),
    "total_memory": p.get_device_total_memory(),
    "integrated": p.is_integrated_gpu(),
    "is_cuda": p.is_cuda() and isinstance(p, NonNvmlCudaPlatform),
    "fp8": p.supports_fp8(),
    "at_least_sm100": p.has_device_capability(100),
    "triton": HAS_TRITON,
}))
"""


def run(code: str, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter."""
    environment = compiling_environment() | changed
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def answer(code: str, *arguments: str) -> Any:
    """Return the JSON on the last line that ``code`` prints."""
    done = run(code, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_native_module_of_the_wheel_loads() -> None:
    """Thirteen modules, each with all its operators: a damaged wheel shows here."""
    loaded = answer(LOAD_ALL)
    assert loaded["modules"] == 13
    operators = loaded["operators"]
    assert {name: operators.get(name, 0) for name in OPERATORS} == OPERATORS


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_vllm_sees_the_chip(chip: Chip) -> None:
    """Queries of the platform, of vLLM's helpers and of torch agree."""
    assert answer(DESCRIBE, str(chip.capability)) == {
        "capability": chip.capability,
        "name": chip.name,
        "shared_memory": chip.shared_memory,
        "compute_units": chip.compute_units,
        "total_memory": chip.total_memory,
        "integrated": chip.integrated,
        "is_cuda": True,
        "fp8": chip.capability >= 89,
        "at_least_sm100": chip.capability >= 100,
        "triton": True,
    }


def test_pretending_late_is_refused() -> None:
    """A module that asked the real platform while it was imported would keep its answer."""
    done = run("import vllm.triton_utils\n" + DESCRIBE, "90")
    assert "pretend() must come before other imports of vLLM: ['vllm." in done.stderr


def test_a_visible_gpu_is_refused() -> None:
    """Otherwise kernels silently become placeholders."""
    done = run(DESCRIBE, "90", CUDA_VISIBLE_DEVICES="0")
    assert 'set CUDA_VISIBLE_DEVICES=""' in done.stderr


def test_stub_source_has_each_symbol_once_and_only_its_own() -> None:
    """Functions that return text must not return a number that is then followed."""
    symbols = ["cudaMalloc", "cudaGetErrorString", "cudaDeviceGetAttribute", "cuMemMap", "free"]
    source = native.stub_source("libcudart.so.13", symbols)
    assert source.count("cudaMalloc(void) { return 100; }") == 1
    assert source.count("const char *cudaGetErrorString(void)") == 1
    assert source.count("cudaDeviceGetAttribute") == 1
    assert "cuMemMap" not in source
    assert "free" not in source


def test_nm_failure_is_reported(tmp_path: Path) -> None:
    """A file that is no library is not taken for one without symbols."""
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    with pytest.raises(subprocess.CalledProcessError):
        native.undefined_symbols([broken])

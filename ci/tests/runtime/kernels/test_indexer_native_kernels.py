"""The compiled kernels around our Triton kernels are in the wheel for each chip, and fit its shared memory.

They write and gather the indexer's cache and the fp8_ds_mla one, and select the top keys. Code of one
capability runs on later ones of the same generation. Capability 11.0 is a machine with an Arm processor,
whose wheel is another one.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest
import triton

from kernelcheck.chips import CHIPS
from kernelcheck.platform import vllm_folder

MODULE: Final = "_C_stable_libtorch.abi3.so"
DUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
EVERYWHERE: Final = (
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "concat_and_cache_ds_mla_kernel",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "topKPerRowPrefill",
    "topKPerRowDecode",
    "persistent_topk_kernel",
)
STATIC: Final = 48 * 1024  # bytes of shared memory that need no opting in
ON_ARM: Final = (110,)

Usage = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def usage() -> Usage:
    """Return the static shared memory of each kernel, by the name of its family and its architecture."""
    command = [str(DUMP), "--dump-resource-usage", str(vllm_folder() / MODULE)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: Usage = defaultdict(dict)
    architecture = function = ""
    for line in report.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            architecture = match[1]
        elif match := re.search(r"Function (\S+):", line):
            function = match[1]
        elif match := re.search(r"SHARED:(\d+)", line):
            for name in (*EVERYWHERE, "cooperative_topk"):
                if name in function:
                    found[name][architecture] = max(int(match[1]), found[name].get(architecture, 0))
    return found


def _runs(architecture: str, capability: int) -> bool:
    """Say whether code of an architecture (``sm_86``, ``sm_90a``, ``sm_100f``) runs on a chip."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", architecture)
    assert match is not None, architecture
    compiled_for, suffix = int(match[1]), match[2]
    if suffix == "a":
        return compiled_for == capability
    return compiled_for // 10 == capability // 10 and compiled_for <= capability


@pytest.mark.parametrize("capability", sorted(CHIPS.keys() - set(ON_ARM)))
@pytest.mark.parametrize("kernel", EVERYWHERE)
def test_kernel_is_there_and_fits(usage: Usage, kernel: str, capability: int) -> None:
    usable = {a: shared for a, shared in usage[kernel].items() if _runs(a, capability)}
    assert usable, f"{kernel}: only {sorted(usage[kernel])}"
    assert max(usable.values()) <= STATIC


@pytest.mark.parametrize("capability", [90, 100, 103])
def test_cooperative_top_k_is_there_where_it_is_chosen(usage: Usage, capability: int) -> None:
    assert any(_runs(architecture, capability) for architecture in usage["cooperative_topk"])

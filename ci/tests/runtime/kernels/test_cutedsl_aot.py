"""Kernels in CuTeDSL on the forward path compile for the chips that launch them.

With vLLM's own requirement nvidia-cutlass-dsl the queries of DeepSeek-V3.2 and GLM-5 take CuTeDSL from
SM100 on, SM110 and SM12x among them, and the merge of the top-k under context parallelism from SM90 on.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from kernelcheck.chips import CHIPS
from kernelcheck.cutedsl import Built, compile_cases
from kernelcheck.jit_sources import Sources, import_closure
from kernelcheck.platform import vllm_folder
from tests.runtime.kernels.cutedsl_cases import MERGE, QUERIES
from tests.runtime.kernels.forward_path_list import DEEP, SEEDS

CASES: Final = "tests.runtime.kernels.cutedsl_cases:every_launch"
FROM_SM90: Final = tuple(capability for capability in CHIPS if capability >= 90)
COMPILED: Final = {
    "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl",
    "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl",
}
KNOWN: Final = {
    "vllm.cute_utils": "parts of kernels",
    "vllm.cute_utils.cvt": "parts of kernels",
    "vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm": "GLM-5.2 on SM103 and SM107 only",
    "vllm.model_executor.warmup.jit_warmup_cutedsl_helper": "compiles the kernels of others",
}


@pytest.fixture(scope="module")
def built() -> list[Built]:
    """What the cases compile, on every chip from SM90 on."""
    return compile_cases(CASES, FROM_SM90)


def _compilers(built: list[Built], family: str, capability: int) -> list[str]:
    return [each.compiler for each in built if each.capability == capability and each.case.startswith(family)]


def test_no_kernel_is_overlooked() -> None:
    """A module that a release adds to the path is compiled here, or is known not to matter."""
    modules = import_closure(Sources(vllm_folder()), SEEDS, DEEP)
    uses = re.compile(r"^\s*(?:import|from) cutlass\b", re.MULTILINE)
    assert {
        name for name, path in modules.items() if uses.search(path.read_text())
    } == COMPILED | KNOWN.keys()


@pytest.mark.parametrize("capability", FROM_SM90)
def test_everything_fits_and_nothing_spills(built: list[Built], capability: int) -> None:
    here = [each for each in built if each.capability == capability]
    assert len(here) > 20
    assert [each for each in here if not each.fits] == []


@pytest.mark.parametrize("capability", FROM_SM90)
def test_queries_take_cutedsl_from_sm100_on(built: list[Built], capability: int) -> None:
    """Each of the twelve forms is a kernel of its own."""
    compiler = "cutedsl" if capability >= 100 else "triton"
    assert _compilers(built, QUERIES, capability) == [compiler] * 12


@pytest.mark.parametrize("capability", FROM_SM90)
def test_the_merge_selects_in_cutedsl(built: list[Built], capability: int) -> None:
    """The selection depends on the width and the number of ranks; what packs for it is Triton."""
    compilers = _compilers(built, MERGE, capability)
    assert compilers.count("cutedsl") == 4
    assert compilers.count("triton") == 8

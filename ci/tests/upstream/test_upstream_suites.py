"""Upstream's own tests of selection and sparse MLA still pass on the patched tree, and ours with them.

Each suite runs as upstream wrote it, in a process of its own that believes in an SM120 GPU
(``pretend_plugin``); those that launch Triton kernels run in Triton's interpreter
(``interpret_plugin``). The counts are exact: a test that stops being collected is as bad as one
that fails. What is left out needs a GPU, FlashInfer or a model hub, before our patches as after.

``PATCHED_TREE`` is the checkout whose ``tests`` run, ``upstream/vllm`` by default. They import the
vLLM that the import path has: the installed patched wheel, or a checkout with its native modules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from pytest_suites import copy_tests, require_passes

HERE: Final = Path(__file__).resolve().parent
CI: Final = HERE.parents[1]
TREE: Final = Path(os.environ.get("PATCHED_TREE") or CI.parent / "upstream" / "vllm")


@dataclass(frozen=True, slots=True)
class Suite:
    """One test file of upstream's."""

    file: str
    before: int
    """Tests that pass on the unpatched tree."""
    ours: int = 0
    """Tests that our patches add to them."""
    select: str = ""
    """Expression for ``-k``: leaves out what cannot run here."""
    interpret: bool = False
    chip: int = 120
    """What the tests see; Triton's interpreter knows no programmatic launch, which SM90 brought."""


# On the machine that has no GPU the "cuda" half of the layouts cannot be allocated.
ON_CPU: Final = "not -cuda]"
WITHOUT_FLASHINFER_OR_HUB: Final = " and ".join(
    f"not {part}"
    for part in (
        "FLASHINFER-True-True",
        "FLASHINFER-False-True",
        "cuda_FLASHINFER_mla_F",
        "(preserves_dcp and CUTLASS)",
        "hopper_mm_prefix",
        "mm_prefix_selects_composite",
        "composite_rejects",
        "rswa_selection",
    )
)

SUITES: Final = [
    Suite("v1/attention/test_flashinfer_sparse_mla_sm120_api.py", before=5),
    Suite("v1/attention/test_flashinfer_sparse_mla_workspace.py", before=10),
    Suite("v1/attention/test_flashmla_nope_sm90_backend_selection.py", before=39),
    Suite("v1/attention/test_cuda_backend_probe_errors.py", before=9, ours=48),
    Suite("v1/attention/test_backend_per_kind.py", before=15),
    Suite("v1/attention/test_mla_prefill_registry.py", before=15),
    Suite("v1/attention/test_mla_noncausal.py", before=8),
    Suite("v1/attention/test_sparse_mla_kv_cache_layout.py", before=21, ours=8, select=ON_CPU),
    Suite("kernels/attention/test_triton_mla_causal_verify_flatten.py", before=16),
    Suite(
        "kernels/attention/test_attention_selector.py",
        before=65,
        select=WITHOUT_FLASHINFER_OR_HUB,
    ),
    Suite("kernels/attention/test_triton_mqa_logits.py", before=0, ours=110, interpret=True),
    Suite("kernels/attention/test_triton_mla_sparse.py", before=0, ours=379, interpret=True),
    Suite("v1/attention/test_triton_mla_sparse_backend.py", before=0, ours=248, interpret=True),
    Suite("v1/attention/test_triton_mla_sparse_decode.py", before=0, ours=33, interpret=True),
    Suite("v1/attention/test_triton_mla_sparse_dcp.py", before=0, ours=2, interpret=True),
    Suite("v1/attention/test_indexer_dcp_merge.py", before=0, ours=46, interpret=True),
    Suite("v1/attention/test_flashmla_sparse_dcp_selection.py", before=0, ours=25),
    Suite("v1/worker/test_draft_jit_warmup.py", before=0, ours=2),
    Suite("config/test_dsa_kv_cache_dtype.py", before=0, ours=3),
    Suite("kernels/attention/test_fp8_e4m3.py", before=0, ours=20, interpret=True),
    Suite("kernels/attention/test_pack_unpack_triton.py", before=8, ours=3, interpret=True, chip=86),
    Suite(
        "kernels/test_fused_deepseek_v32_norm_rope.py",
        before=0,
        ours=7,
        select="software_e4m3 or without_cutedsl",
        interpret=True,
        chip=80,
    ),
    Suite("kernels/test_glm5next_indexer_fp8.py", before=0, ours=14, interpret=True, chip=80),
    Suite(
        "kernels/test_kpool_decode_update_batched.py",
        before=13,
        select="not fuzz",  # draws with a generator of the GPU
        interpret=True,
        chip=80,
    ),
    Suite("kernels/mhc/test_mhc_without_nvcc.py", before=0, ours=6),
    Suite("utils_/test_deep_gemm_support.py", before=0, ours=24),
    Suite("utils_/test_mqa_logits_backend.py", before=0, ours=33),
    Suite("v1/attention/test_indexer_native_next_n.py", before=9, ours=3),
    Suite("v1/attention/test_indexer_tp_row_shard.py", before=12),
    Suite("v1/attention/test_indexer_logits_memory.py", before=0, ours=15),
    Suite("v1/attention/test_indexer_without_deep_gemm.py", before=0, ours=5),
]


@pytest.fixture(scope="module")
def tests_of_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tree's tests and settings, and not the tree's vLLM."""
    return copy_tests(TREE, tmp_path_factory.mktemp("upstream"))


def _environment(suite: Suite) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(CI), str(HERE), *([inherited] if inherited else [])]
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "KERNELCHECK_CHIP": str(suite.chip),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **({"TRITON_INTERPRET": "1"} if suite.interpret else {}),
    }


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: Path(suite.file).stem)
def test_suite(tests_of_tree: Path, suite: Suite) -> None:
    plugin = "interpret_plugin" if suite.interpret else "pretend_plugin"
    selection = ["-k", suite.select] if suite.select else []
    options = ["-p", plugin, *selection]
    require_passes(tests_of_tree, suite.file, suite.before + suite.ours, _environment(suite), options)

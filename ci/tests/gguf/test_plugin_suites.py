"""The plugin's own tests, and those of our patches, pass with the installed wheels of both targets.

The tests are those of the patched tree (`PATCHED_PLUGIN_TREE`, by default beside `PATCHED_TREE`); they import
the plugin and the vLLM that are installed. The counts are exact: a test that stops being collected is as bad
as one that fails. What is left out needs files that the plugin's sdist lacks, a GPU or a model hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from plugin_tree import TREE
from pytest_suites import copy_tests, require_passes


@dataclass(frozen=True, slots=True)
class Suite:
    """One test file of the plugin."""

    file: str
    before: int
    """Tests that pass on the unpatched tree."""
    ours: int = 0
    """Tests that our patches add to them."""


SUITES: Final = [
    Suite("test_gguf_download.py", before=11),
    Suite("test_gguf_utils.py", before=25),
    Suite("test_plugin.py", before=13),
    Suite("test_gguf_weight_names.py", before=0, ours=17),
    Suite("test_tensor_parallel.py", before=0, ours=63),
    Suite("test_replicated_linear.py", before=0, ours=10),
    Suite("test_deepseek_names.py", before=0, ours=2),
    Suite("test_split_kv_b.py", before=0, ours=11),
    Suite("test_glm_dsa.py", before=0, ours=55),
    Suite("test_shards.py", before=0, ours=15),
    Suite("test_subfolders.py", before=0, ours=15),
    Suite("test_guards.py", before=0, ours=20),
    Suite("test_mtp.py", before=0, ours=20),
    Suite("test_large_tensors.py", before=0, ours=61),
    Suite("test_compiled_moe_limits.py", before=0, ours=12),
    Suite("test_byte_parameters.py", before=0, ours=4),
    Suite("test_compiled_kernels.py", before=0, ours=4),
]
NOT_HERE: Final = {"test_gguf_generation.py", "test_kernels.py", "test_multimodal_gguf.py"}


@pytest.fixture(scope="module")
def tests_of_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tree's tests and settings, and not the tree's plugin."""
    return copy_tests(TREE, tmp_path_factory.mktemp("plugin"))


def test_no_file_is_forgotten() -> None:
    found = {path.name for path in (TREE / "tests").glob("test_*.py")}
    assert found == {suite.file for suite in SUITES} | NOT_HERE


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: Path(suite.file).stem)
def test_suite(tests_of_tree: Path, suite: Suite) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "VLLM_TARGET_DEVICE": "cpu"}
    require_passes(tests_of_tree, suite.file, suite.before + suite.ours, environment)

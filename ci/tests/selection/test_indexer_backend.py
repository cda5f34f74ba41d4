"""What computes the indexer's logits: each chip x DeepGEMM x compiler, through vLLM's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kernelcheck.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Sequence

DRIVER: Final = Path(__file__).resolve().with_name("indexer_driver.py")
CI: Final = DRIVER.parents[2]
VARIABLE: Final = "VLLM_SPARSE_INDEXER_LOGITS_BACKEND"
EXTERNAL, VENDORED = "deep_gemm", "vllm.third_party.deep_gemm"
WITH_KERNELS: Final = (90, 100, 103, 120, 121)
WITH_FOREIGN_KERNELS: Final = (90, 100, 103)

Answers = dict[tuple[str, bool, str], dict[str, Any]]


def _states() -> list[tuple[str, bool, str]]:
    return list(product(("absent", "vendored", "foreign"), (True, False), ("auto", "deep_gemm", "triton")))


def _ask(capability: int, folder: Path, states: Sequence[tuple[str, bool, str]]) -> Answers:
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(CI), *([inherited] if inherited else [])]
    names = ("deep_gemm", "compiler", "requested")
    question = json.dumps([dict(zip(names, state, strict=True)) for state in states])
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(capability), str(folder)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
        input=f"{question}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(states, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module", params=sorted(CHIPS))
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Answers]:
    """Return a capability and the answers of its machine in every state."""
    capability = int(request.param)
    return capability, _ask(capability, tmp_path_factory.mktemp(f"sm{capability}"), _states())


def _works(capability: int, deep_gemm: str, *, compiler: bool) -> bool:
    """Say whether there are kernels for the chip and something to compile them with."""
    return capability in WITH_KERNELS and deep_gemm != "absent" and compiler


def _reason(capability: int, deep_gemm: str) -> str:
    if capability not in WITH_KERNELS:
        return f"does not support compute capability {capability // 10}.{capability % 10}"
    return "is not installed" if deep_gemm == "absent" else "compiles its kernels with nvcc"


def test_deep_gemm_where_it_works_and_triton_elsewhere(machine: tuple[int, Answers]) -> None:
    capability, answers = machine
    for (deep_gemm, compiler, requested), answer in answers.items():
        if requested != "auto":
            continue
        works = _works(capability, deep_gemm, compiler=compiler)
        assert answer["backend"] == ("deep_gemm" if works else "triton"), answer
        assert works or _reason(capability, deep_gemm) in answer["reason"]
        # Layers that would die without it do not count on it either.
        assert answer["linear"] == works
        assert answer["mx_scales"] == (works and capability in (100, 103))


def test_the_package_that_has_the_kernels_is_called(machine: tuple[int, Answers]) -> None:
    capability, answers = machine
    foreign = answers["foreign", True, "auto"]
    assert answers["vendored", True, "auto"]["module"] == (VENDORED if capability in WITH_KERNELS else None)
    if capability in WITH_FOREIGN_KERNELS:
        assert foreign["module"] == EXTERNAL
        assert not any("is not used" in warning for warning in foreign["warnings"])
        return
    # One without them is named, with what it has.
    assert foreign["module"] == (VENDORED if capability in WITH_KERNELS else None)
    if capability in WITH_KERNELS:
        named = [warning for warning in foreign["warnings"] if "is not used" in warning]
        assert len(named) == 1
        assert "foreign/deep_gemm" in named[0]
        assert f"no kernels for sm{capability // 10}0 (it has: sm100, sm90)" in named[0]


def test_either_can_be_forced(machine: tuple[int, Answers]) -> None:
    capability, answers = machine
    for (deep_gemm, compiler, requested), answer in answers.items():
        if requested == "triton":
            assert (answer["backend"], answer["reason"]) == ("triton", f"{VARIABLE}=triton")
            assert answer["module"] is None
            assert not answer["mx_scales"]
        elif requested == "deep_gemm" and not _works(capability, deep_gemm, compiler=compiler):
            assert answer["backend"] is None
            assert _reason(capability, deep_gemm) in answer["reason"]
        elif requested == "deep_gemm":
            assert (answer["backend"], answer["reason"]) == ("deep_gemm", "requested")


def test_one_line_says_which_and_why(machine: tuple[int, Answers]) -> None:
    """The second time in a process, as on other layers, nothing is said."""
    _, answers = machine
    seen: set[str] = set()
    for answer in answers.values():
        if answer["backend"] is None:
            assert answer["lines"] == []
            continue
        line = f"Sparse indexer logits are computed by {answer['backend']} ({answer['reason']})."
        assert answer["lines"] == ([] if line in seen else [line])
        seen.add(line)
    assert len(seen) >= 2


def test_integrated_gpus_give_the_logits_less_memory(machine: tuple[int, Answers]) -> None:
    capability, answers = machine
    given = answers["vendored", False, "auto"]["max_logits_mb"]
    assert given == (128 if CHIPS[capability].integrated else 512)

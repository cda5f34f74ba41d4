"""What the GPU proof compares has the same weights, and its judgement tells right from wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from plugin_tree import REPOSITORY, run_python

GPU = REPOSITORY / "ci" / "gpu"
sys.path.insert(0, str(GPU))
import gguf_products  # noqa: E402 - ci/gpu is no package
import gguf_proof  # noqa: E402
import gguf_ranks  # noqa: E402
import gguf_worker  # noqa: E402

PAIRS = ("backends", "dequantized", "dequantized, native", "eight-bit", "compiled", "triton", "damaged")
SIZES = (0.05, 0.04, 0.03, 0.2, 0.25, 0.15, 0.6)
GOOD = {name: {"near": size / 3, "far": size} for name, size in zip(PAIRS, SIZES, strict=True)}


@pytest.mark.parametrize(("kind", "roles"), [("twin", ["model"]), ("language", ["model", "draft"])])
def test_file_and_checkpoint_load_the_same_parameters(tmp_path: Path, kind: str, roles: list[str]) -> None:
    script = Path(__file__).with_name("compare_twins.py")
    done = run_python(script, kind, tmp_path, extra_path=str(GPU))
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert list(found) == [f"{label} {role}" for role in roles for label in ("generic", "CUDA")]
    for what, compared in found.items():
        assert compared["parameters"] > 15, what
        assert compared["different"] == [], what


def test_what_is_as_it_must_be_passes() -> None:
    assert gguf_proof.judge(GOOD) == []


@pytest.mark.parametrize("place", ["near", "far"])
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("dequantized", 2.0),
        ("dequantized, native", 3.0),
        ("compiled", 1.3),
        ("triton", 2.1),
        ("damaged", 0.3),
    ],
)
def test_each_figure_is_judged(name: str, factor: float, place: str) -> None:
    changed = GOOD | {name: GOOD[name] | {place: GOOD[name][place] * factor}}
    [problem] = gguf_proof.judge(changed)
    assert place in problem
    assert name.removesuffix("d") in problem or name == "damaged"


def test_what_was_not_measured_is_a_problem() -> None:
    assert gguf_proof.judge(GOOD | {"triton": None}) == ["not measured: triton"]
    nothing = {"near": float("nan"), "far": float("nan")}
    assert len(gguf_proof.judge(GOOD | {"compiled": nothing})) == 2


def test_ranks_are_judged() -> None:
    spread = {"bf16, ranks": GOOD["backends"], "compiled, ranks": GOOD["eight-bit"]}
    assert gguf_proof.judge(GOOD | spread) == []
    wrong = GOOD | spread | {"compiled, ranks": GOOD["damaged"]}
    assert [problem.split(" (")[0] for problem in gguf_proof.judge(wrong)] == ["compiled, ranks"] * 2


def test_jobs_of_a_variant() -> None:
    twins = gguf_proof.Twins("twin", "a.gguf", "bf16", [], "damaged.gguf", drafted=1)
    variants = ["bf16", "dequantized/FLASHMLA_SPARSE", "compiled/2ranks", "damaged"]
    jobs = [twins.job(variant) for variant in variants]
    ours = jobs[0].backend
    assert [(job.model, job.kernels, job.backend, job.ranks) for job in jobs] == [
        ("bf16", "compiled", ours, 1),
        ("a.gguf", "dequantized", "FLASHMLA_SPARSE", 1),
        ("a.gguf", "compiled", ours, 2),
        ("damaged.gguf", "dequantized", ours, 1),
    ]
    assert len({job.name for job in jobs}) == 4
    assert gguf_worker.engine_arguments(jobs[0])["speculative_config"]["num_speculative_tokens"] == 1
    assert "speculative_config" not in gguf_worker.engine_arguments(replace(jobs[0], drafted=0))


def test_ranks_are_spread_and_named() -> None:
    job = gguf_worker.GgufJob("a", "a.gguf", "a", "TRITON_MLA_SPARSE", ranks=2)
    arguments = gguf_worker.engine_arguments(job)
    assert arguments["tensor_parallel_size"] == 2
    module, name = arguments["worker_extension_cls"].split(".")
    assert getattr(sys.modules[module], name) is gguf_ranks.GgufRank
    assert "worker_extension_cls" not in gguf_worker.engine_arguments(replace(job, ranks=1))


@pytest.mark.parametrize("answers", [[], [True, False]])
def test_ranks_without_nccl_are_an_error(answers: list[bool]) -> None:
    asked: list[str] = []

    def collective_rpc(method: str) -> list[bool]:
        asked.append(method)
        return answers if len(asked) == 1 else [True, True]

    engine = SimpleNamespace(collective_rpc=collective_rpc)
    with pytest.raises(RuntimeError, match="without NCCL"):
        gguf_ranks.require_nccl(engine)
    gguf_ranks.require_nccl(engine)
    assert all(hasattr(gguf_ranks.GgufRank, method) for method in asked)


def test_failed_step_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("no disk")

    out = tmp_path / "gguf.json"
    monkeypatch.setattr(gguf_proof, "random_twins", broken)
    monkeypatch.setattr(gguf_proof, "run_products", lambda _: {"problems": []})
    monkeypatch.setattr(gguf_proof, "run_wide", lambda _: {"problems": [], "engines": {}})
    words = ["proof", "--plugin-tests", str(tmp_path), "--out", str(out), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", [*words, "--steps", "twin", "products", "wide"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gguf_proof, "host", lambda *_, **__: {"card": "none"})

    assert gguf_proof.main() == 1

    report = json.loads(out.read_text())
    assert "no disk" in report["twin"]["problems"][0]
    assert report["products"]["problems"] == report["wide"]["problems"] == []
    assert (report["passed"], report["result"], report["host"]) == (False, "FAILED", {"card": "none"})
    assert "FAILED" in capsys.readouterr().out


def test_engine_is_not_started_without_time(tmp_path: Path) -> None:
    proof = gguf_proof.Proof(tmp_path, tmp_path, deadline=0.0)
    proof.run([gguf_proof.Twins("twin", "a.gguf", "bf16", []).job("triton")], [[1]], workers=1)
    assert proof.errors == {"twin-triton": "not started: no time left"}
    assert proof.differences("twin-triton", "twin-triton") is None


def test_activations_of_eight_bits() -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    x[1, :32] = 0
    blocks = x.float().numpy().reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    numbers = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    expected = (numbers * scale.astype(np.float16).astype(np.float32)).reshape(3, 64)
    assert np.array_equal(gguf_worker.eight_bits(x).numpy(), expected)


class Engine:
    """Generates two tokens a step, as an engine whose drafts are accepted."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(step=lambda: None)

    def generate(self, prompts: list[Any], params: Any, **_: Any) -> list[Any]:
        """Choose the same tokens for every prompt."""
        for _step in range(params.max_tokens // 2):
            self.llm_engine.step()
        tokens = list(range(params.max_tokens))
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)]) for _ in prompts
        ]


def test_steps_tell_accepted_drafts() -> None:
    found = gguf_worker.continued(Engine(), [[1, 2], [3]])
    assert found["steps"] * 2 == found["tokens_each"] == gguf_worker.CONTINUED_TOKENS
    assert found["steps"] <= gguf_proof.DRAFTS_SAVE * found["tokens_each"]
    assert found["tokens"] == [*range(gguf_worker.CONTINUED_TOKENS)] * 2


class Products:
    """Products as the plugin has them, of weights that gguf-py decodes, wrong where they are told to be."""

    def __init__(self, lost_expert: int) -> None:
        self._CUDA_ENABLED = False
        self.lost_expert = lost_expert

    def multiply(self, w: torch.Tensor, x: torch.Tensor, kind: int, rows: int) -> torch.Tensor:
        """Multiply by a matrix."""
        assert w.shape[0] == rows
        return (x.double() @ gguf_products.weights_of(w, GGMLType(kind)).T).to(x.dtype)

    def choose(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        ids: torch.Tensor,
        top_k: int,
        kind: int,
        rows: int,
        tokens: int,
    ) -> torch.Tensor:
        """Multiply by the experts of tokens."""
        assert x.shape[0] == tokens
        chosen = [
            torch.zeros(rows, dtype=x.dtype)
            if expert == self.lost_expert and self._CUDA_ENABLED
            else self.multiply(w[expert], x[slot // top_k, None], kind, rows)[0]
            for slot, expert in enumerate(ids.flatten().tolist())
        ]
        return torch.stack(chosen)

    def choose_aligned(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, *rest: int) -> torch.Tensor:
        """Multiply by the experts of tokens that are sorted by them."""
        kind, rows, top_k, tokens = rest
        return self.choose(x, w, ids, top_k, kind, rows, tokens)

    ggml_mul_mat_a8 = ggml_mul_mat_vec_a8 = multiply
    ggml_moe_a8_vec, ggml_moe_a8 = choose, choose_aligned
    ggml_moe_get_block_size = int


def test_products_find_an_expert_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_products, "DEVICE", "cpu")
    monkeypatch.setattr(gguf_products, "LINEAR", (GGMLType.Q8_0,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    experts = {
        "prefill": gguf_products.Experts(GGMLType.Q4_K, (9, 64, 256), (0, 3, 8), 11),
        "decode": gguf_products.Experts(GGMLType.Q6_K, (9, 64, 256), (0, 3, 8), 3, 3, vector=True),
    }
    monkeypatch.setattr(gguf_products, "EXPERTS", experts)
    available = {"triton": True, "compiled": True}

    found = gguf_products.measure_all(Products(lost_expert=8), lambda ids, *_: (ids,), available)

    right = [product["error"] for product in found["triton"].values()]
    assert len(right) == 6
    assert max(right) < gguf_products.ALLOWED
    for name in experts:
        assert found["compiled"][name]["error"] == pytest.approx(1.0)


def test_eight_bits_and_bf16_weights_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_products, "DEVICE", "cpu")
    x = torch.randn(50, 6144, dtype=torch.bfloat16)
    for kind in gguf_products.LINEAR:
        weights = gguf_products.weights_of(gguf_products.random_blocks(kind, 300, 6144), kind)
        rounded = gguf_worker.eight_bits(x).double() @ weights.bfloat16().double().T
        error = gguf_products.error_of(rounded.bfloat16(), x.double() @ weights.T)
        assert 0.001 < error < gguf_products.ALLOWED / 2, kind


def test_products_report_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_products, "LINEAR", ())
    monkeypatch.setattr(gguf_products, "EXPERTS", {})
    found = gguf_products.measure_all(Products(0), lambda *_: (), {"triton": True, "compiled": False})
    assert found["compiled"] == {"all": {"failed": "the kernels cannot be imported"}}
    assert gguf_products.attempt(lambda: 1 / 0)["failed"].endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("kind", list(gguf_products.SCALES))
def test_random_blocks_have_finite_weights(monkeypatch: pytest.MonkeyPatch, kind: GGMLType) -> None:
    monkeypatch.setattr(gguf_products, "DEVICE", "cpu")
    weights = gguf_products.weights_of(gguf_products.random_blocks(kind, 5, 512), kind)
    assert weights.shape == (5, 512)
    assert weights.isfinite().all()
    assert weights.std() > 0

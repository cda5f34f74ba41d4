"""What the GPU proof compares has the same weights, and its judgement tells right from wrong."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from plugin_tree import REPOSITORY, TREE, run_python

GPU = REPOSITORY / "ci" / "gpu"
sys.path.insert(0, str(GPU))
import gguf_products  # noqa: E402 - ci/gpu is no package
import gguf_proof  # noqa: E402
import gguf_ranks  # noqa: E402
import gguf_wide  # noqa: E402
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
    for name in spread:  # a checkpoint that is wrong on two ranks is no bound for the file
        wrong = GOOD | spread | {name: GOOD["damaged"]}
        assert [problem.split(" (")[0] for problem in gguf_proof.judge(wrong)] == [name] * 2


def test_graphs_are_judged() -> None:
    graphs = {"compiled, graphs": GOOD["eight-bit"]}
    assert gguf_proof.judge(GOOD | graphs) == []
    wrong = gguf_proof.judge(GOOD | {"compiled, graphs": GOOD["damaged"]})
    assert [problem.split(" (")[0] for problem in wrong] == ["compiled, graphs"] * 2


def test_jobs_of_a_variant() -> None:
    twins = gguf_proof.Twins("twin", "a.gguf", "bf16", [], "damaged.gguf", drafted=1)
    variants = ["bf16", "dequantized/FLASHMLA_SPARSE", "compiled/2ranks", "damaged", "compiled/graphs"]
    jobs = [twins.job(variant) for variant in variants]
    ours = jobs[0].backend
    assert [(job.model, job.kernels, job.backend, job.ranks) for job in jobs] == [
        ("bf16", "compiled", ours, 1),
        ("a.gguf", "dequantized", "FLASHMLA_SPARSE", 1),
        ("a.gguf", "compiled", ours, 2),
        ("damaged.gguf", "dequantized", ours, 1),
        ("a.gguf", "compiled", ours, 1),
    ]
    assert len({job.name for job in jobs}) == 5
    arguments = [gguf_worker.engine_arguments(job) for job in jobs]
    assert [found["enforce_eager"] for found in arguments] == [True, True, True, True, False]
    assert arguments[-1]["compilation_config"] == {"cudagraph_capture_sizes": [2, 16]}
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


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q5_K])
def test_minima_of_blocks(monkeypatch: pytest.MonkeyPatch, kind: GGMLType) -> None:
    """What is left of the weights without them is a scale times numbers from 0 on, in groups of 32."""
    monkeypatch.setattr(gguf_products, "DEVICE", "cpu")
    blocks = gguf_products.random_blocks(kind, 4, 512)
    minima = gguf.dequantize(gguf_worker.minima_of(blocks, int(kind)).numpy(), kind).reshape(-1, 32)
    whole = gguf.dequantize(blocks.numpy(), kind).reshape(-1, 32)
    assert (minima <= 0).all()
    assert minima.min() < -1
    assert (minima == minima[:, :1]).all()
    assert (whole - minima >= -1e-3).all()


def test_means_of_blocks() -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    found = gguf_worker.means_of_blocks(x).reshape(3, 2, 32)
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert torch.equal(found.sum(-1), x.float().reshape(3, 2, 32).sum(-1).half().float())


STANDING_IN = {"dequantized": (0.0, 1e-5), "eight-bit": (1e-3, 0.3), "wrong-expert": (0.5, 3.0)}
"""What they differ by, at least and at most."""


@pytest.mark.parametrize("kernels", STANDING_IN)
def test_stand_ins_of_the_products(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """They give what is expected of 3 experts of which 2 are chosen, or differ as they should."""
    plugin = SimpleNamespace(
        ops=SimpleNamespace(ggml_dequantize=decoded), quantization=SimpleNamespace(UNQUANTIZED_TYPES=())
    )
    monkeypatch.setitem(sys.modules, "vllm_gguf_plugin", plugin)
    monkeypatch.setattr(gguf_products, "DEVICE", "cpu")
    torch.manual_seed(0)
    kind = int(GGMLType.Q4_K)
    w1 = gguf_products.random_blocks(GGMLType.Q4_K, 3, 512, 256)
    w2 = gguf_products.random_blocks(GGMLType.Q4_K, 3, 256, 256)
    for blocks in (w1, w2):  # else the products of products are no float16
        scales = blocks.view(torch.float16).view(-1, 72)[:, :2]
        scales *= 2.0**-12
    x, ids = torch.randn(8, 256), torch.tensor([[0, 1]] * 4 + [[2, 1]] * 4)
    weights = torch.rand(8, 2)
    expected = torch.zeros(8, 256, dtype=torch.float64)
    for row, slot in np.ndindex(8, 2):
        expert = ids[row, slot]
        first, second = (gguf_products.weights_of(w[expert], GGMLType.Q4_K) for w in (w1, w2))
        gate, up = (first @ x[row].double()).chunk(2)
        expected[row] += weights[row, slot] * (second @ (torch.nn.functional.silu(gate) * up))

    gguf_worker.multiply_dequantized(kernels)
    found = plugin.quantization.fused_moe_gguf(x, w1, w2, weights, ids, kind, kind, "silu")

    least, most = STANDING_IN[kernels]
    assert least <= gguf_products.error_of(found, expected) <= most


def decoded(blocks: torch.Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as the plugin does."""
    return gguf_products.weights_of(blocks, GGMLType(kind)).reshape(rows, columns).to(dtype)


WIDE = {
    "eight-bit": {"near": 0.1, "far": 0.2},
    "wrong-expert": {"near": 0.9, "far": 1.1},
    "compiled": {"near": 0.11, "far": 0.19},
    "triton": {"near": 0.03, "far": 0.06},
}


def test_text_of_the_wide_file_is_judged() -> None:
    judge = gguf_proof.judge_wide_text
    assert judge(WIDE) == []
    assert judge(WIDE | {"compiled": None}) == ["not measured: compiled"]
    for kernels in ("compiled", "triton"):
        changed = WIDE | {kernels: {"near": 0.16, "far": 0.31}}
        found = [problem.split(":")[0] for problem in judge(changed)]
        assert found == [f"{kernels} (near)", f"{kernels} (far)"]
    assert len(judge(WIDE | {"wrong-expert": {"near": 0.2, "far": 0.4}})) == 2
    nothing = {"near": float("nan"), "far": float("nan")}
    assert len(judge(WIDE | {"eight-bit": nothing})) == 6


@pytest.fixture
def known_gguf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of the plugin's tests that makes tensors."""
    monkeypatch.syspath_prepend(str(TREE / "tests"))
    return import_module("known_gguf")


@pytest.mark.parametrize("rows", [2048, 6144])
def test_experts_of_the_wide_file_differ(known_gguf: Any, rows: int) -> None:
    assert len({expert * rows % gguf_wide.TILE_ROWS for expert in range(256)}) == 256
    tensor = known_gguf.FileTensor("blk.1.ffn_down_exps.weight", (3, rows, 512), GGMLType.Q4_K)
    experts = gguf_wide.tiled(tensor)
    assert experts.shape == (3, rows, 2 * 144)
    assert not any(np.array_equal(*pair) for pair in combinations(experts, 2))


def test_groups_of_the_wide_file_are_centred(known_gguf: Any) -> None:
    tensor = known_gguf.FileTensor("blk.0.ffn_up.weight", (600, 6144), GGMLType.Q4_K)
    groups = gguf.dequantize(gguf_wide.tiled(tensor), GGMLType.Q4_K).reshape(-1, 32)
    assert (groups.max(1) > 0).all()
    assert (groups.min(1) < 0).all()
    size = np.abs(groups).max(1)
    assert (np.abs(groups.max(1) + groups.min(1)) <= 0.2 * size).mean() > 0.5
    assert np.abs(groups.mean(1)).mean() < 0.25 * groups.std()
    assert 0.5 < groups.std() * 6144**0.5 < 1.5


def test_report_names_the_plugin(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_gguf_plugin-0.0.5+bw.0.sabc-cp310-abi3-linux_x86_64.whl"
    component = {"properties": [{"name": "vllm-stack:stack-id", "value": "abc"}]}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "x.dist-info/sboms/vllm-stack.cdx.json", json.dumps({"metadata": {"component": component}})
        )
    found = gguf_proof.describe_plugin(wheel)
    assert found["wheel"] == wheel.name
    assert found["stack_id"] == "abc"
    assert found["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert len(found["kernels_sha256"]) == 64


class Engine:
    """Generates two tokens a step, as an engine whose drafts are accepted."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(make_spec_decoding_stats=lambda *_, **__: None)
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.llm_engine = SimpleNamespace(step=lambda: None, engine_core=core)

    def generate(self, prompts: list[Any], params: Any, **_: Any) -> list[Any]:
        """Choose the same tokens for every prompt."""
        for _step in range(params.max_tokens // 2):
            self.llm_engine.step()
            for _prompt in prompts:
                self.scheduler.make_spec_decoding_stats(None, num_draft_tokens=1, num_accepted_tokens=1)
        tokens = list(range(params.max_tokens))
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)]) for _ in prompts
        ]


def test_steps_and_drafts_are_counted() -> None:
    found = gguf_worker.continued(Engine(), [[1, 2], [3]])
    assert found["steps"] * 2 == found["tokens_each"] == gguf_worker.CONTINUED_TOKENS
    assert found["drafts"] == {"drafted": 2 * found["steps"], "accepted": 2 * found["steps"]}
    assert found["tokens"] == [*range(gguf_worker.CONTINUED_TOKENS)] * 2


ON_RANKS = {"bf16/2ranks": 39, "compiled/2ranks": 40}
ON_ONE = {"bf16": 40, "dequantized": 20, "compiled": 41, "triton": 90, "compiled/graphs": 42}
SHARES = ON_ONE | ON_RANKS
"""Drafts of 100 that engines accept; half as many as the checkpoint are enough."""


def judged_drafts(tmp_path: Path, shares: dict[str, int], ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Judge engines that accept so many of 100 drafts."""
    proof = gguf_proof.Proof(tmp_path, tmp_path, deadline=0.0)
    twins = gguf_proof.Twins("language", "a.gguf", "bf16", [], drafted=1)
    for variant, accepted in shares.items():
        drafts = {"drafted": 100, "accepted": accepted}
        proof.figures[twins.job(variant).name] = {"continued": {"steps": 50, "drafts": drafts}}
    return gguf_proof.judge_drafts(proof, twins, ranks)


def test_accepted_drafts_are_judged(tmp_path: Path) -> None:
    found, problems = judged_drafts(tmp_path, SHARES, 2)
    assert problems == []
    assert list(found) == list(SHARES)
    assert found["bf16"] == {"steps": 50, "drafted": 100, "accepted": 40}
    assert list(judged_drafts(tmp_path, SHARES, 1)[0]) == list(ON_ONE)
    for variant in SHARES:
        few = judged_drafts(tmp_path, SHARES | {variant: 9 if variant == "bf16" else 19}, 2)[1]
        assert [problem.split(":")[0] for problem in few] == [variant]
    without = {variant: accepted for variant, accepted in SHARES.items() if variant != "triton"}
    assert judged_drafts(tmp_path, without, 2)[1] == ["triton: no drafts"]
    assert len(judged_drafts(tmp_path, dict.fromkeys(SHARES, 0), 2)[1]) == len(SHARES)


def test_engines_of_several_ranks_have_ports_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str | None] = {}

    def run_logged(command: list[str], _log: Path, environment: dict[str, str], *_: Any) -> str:
        given[Path(command[-1]).stem] = environment.get("VLLM_PORT")
        return "exit status 1"

    monkeypatch.delenv("VLLM_PORT", raising=False)
    monkeypatch.setattr(gguf_proof, "run_logged", run_logged)
    proof = gguf_proof.Proof(tmp_path, tmp_path, deadline=float("inf"))
    twins = gguf_proof.Twins("twin", "a.gguf", "bf16", [])
    proof.run([twins.job(variant) for variant in ("triton", "bf16/2ranks", "compiled/2ranks")], [[1]], 1)
    assert given == {"twin-triton": None, "twin-bf16-2ranks": "20000", "twin-compiled-2ranks": "20050"}
    assert set(proof.errors) == set(given)


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
    assert len(right) == 8
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

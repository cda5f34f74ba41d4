"""Small seeded DSA models in which attention decides the prediction, and text that they predict.

Each token x has a random code a(x). Its embedding holds a(x), which keys, values and the indexer
read, and a(partner(x)), which queries read: a token attends to earlier occurrences of its partner.
Embeddings leave half of the residual stream empty; only attention (and, weakly, MLPs and linear
attention) writes there, and the output head reads nothing else. The head turns the partner's value
into the successor of x, and the text follows x with its successor most of the time. So a model
whose attention is wrong does not merely predict differently: it predicts this text badly.

The codes pass through random matrices of full rank (latent projections, per-head up-projections,
RoPE parts, indexer heads, routed experts), so that every part of the attention path carries signal.

Each model has one layer for multi-token prediction: its last layer again, which sees the next token
alone, looks up that token's partner and so predicts the successor most of the time.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HIDDEN = 2048
CODE = 512  # width of a token's code, of the latent and of the query latent
KEYS = slice(0, CODE)
QUERIES = slice(CODE, 2 * CODE)
CONSTANT = 2 * CODE  # one feature with the same value for every token
RESULT = slice(2 * CODE + 1, HIDDEN)  # written by attention, read by the output head
CONSTANT_VALUE = 4.0
INDEX_DIM = 128
EXPERTS, EXPERT_WIDTH = 8, 256
MLP_WIDTH = 1024
LINEAR_HEADS, LINEAR_DIM, CONV = 8, 128, 4
KPOOL = 4
DRAFT_FOLDER = "draft"
TOP_LOGIT = 9.0
MATCH_SCORE = (4.0, 7.0)  # attention score of a matching key, by head
FOLLOW = 0.8  # probability that a token's successor follows it
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SmallModel:
    """Shape of one model.

    Attributes:
        name: Key of `MODELS`.
        heads: Attention heads.
        nope: Width of a query head without RoPE.
        rope: Width of its RoPE part; 0 for GLM-5.3-Flash.
        index_heads: Heads of the indexer; DeepGEMM takes no fewer than 32, so that 16 are padded for it.
        index_topk: Rows that the indexer selects; a pooled indexer selects them in whole pools.
        vocab: Tokens. The larger, the fewer occurrences of a partner a context holds, and the more
            it matters that each of them is read.
        layers: Per layer, whether it is sparse MLA ("mla"), sparse MLA with the top-k of an earlier layer
            ("shared"), or linear attention ("linear"). The last one is not shared.

    """

    name: str
    heads: int
    nope: int
    rope: int
    index_heads: int
    index_topk: int
    vocab: int
    layers: tuple[str, ...]

    @property
    def mla_layers(self) -> int:
        """Number of layers of sparse MLA."""
        return sum(layer in ("mla", "shared") for layer in self.layers)

    @property
    def is_pooled(self) -> bool:
        """Whether the indexer pools its keys, as GLM-5.3-Flash does."""
        return self.rope == 0


VALUE = 256
MODELS = {
    model.name: model
    for model in (
        SmallModel(
            "glm5", heads=64, nope=192, rope=64, index_heads=32, index_topk=512, vocab=512,
            layers=("mla",) * 3,
        ),
        SmallModel(
            "glm53flash", heads=16, nope=256, rope=0, index_heads=16, index_topk=512, vocab=2048,
            layers=("linear", "mla", "mla", "mla"),
        ),
        SmallModel(
            "glm52", heads=64, nope=192, rope=64, index_heads=32, index_topk=512, vocab=512,
            layers=("mla", "mla", "shared", "shared", "mla"),
        ),
    )
}  # fmt: skip


def config(model: SmallModel) -> dict[str, Any]:
    """Return the contents of config.json."""
    common = {
        "vocab_size": model.vocab, "hidden_size": HIDDEN, "intermediate_size": MLP_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH, "num_hidden_layers": len(model.layers),
        "num_attention_heads": model.heads, "num_key_value_heads": model.heads,
        "n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "kv_lora_rank": CODE, "q_lora_rank": CODE, "qk_rope_head_dim": model.rope,
        "qk_nope_head_dim": model.nope, "v_head_dim": VALUE, "index_topk": model.index_topk,
        "index_head_dim": INDEX_DIM, "index_n_heads": model.index_heads,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "n_group": 1,
        "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if not model.is_pooled:
        sharing = {"index_topk_freq": 3, "index_skip_topk_offset": 2} if "shared" in model.layers else {}
        return common | sharing | {
            "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }  # fmt: skip
    kinds = {"linear": "linear_attention", "mla": "indexed_attention"}
    return common | {
        "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text",
        "layer_types": [kinds[layer] for layer in model.layers],
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(model.layers) - 1),
        "index_kpool": KPOOL, "index_kpool_always_select_tail": True,
        "linear_head_dim": LINEAR_DIM, "linear_num_heads": LINEAR_HEADS,
        "linear_conv_kernel_dim": CONV, "linear_lower_bound": -5.0,
        "swiglu_limit": 10.0, "mhc": False, "mla_use_nope": True,
        "indexer_rope_interleave": False,
    }  # fmt: skip


class Random:
    """Seeded source of normal matrices, the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Draw independent normal values."""
        return torch.randn(*shape, generator=self.generator) * std

    def uniform(self, count: int, low: float, high: float) -> torch.Tensor:
        """Draw independent uniform values."""
        return torch.rand(count, generator=self.generator) * (high - low) + low

    def permutation(self, count: int) -> torch.Tensor:
        """Draw a permutation."""
        return torch.randperm(count, generator=self.generator)


@dataclass(frozen=True)
class Language:
    """What the text and the weights agree on."""

    codes: torch.Tensor  # [vocab, CODE]
    partner: torch.Tensor  # [vocab]
    successor: torch.Tensor  # [vocab]


def make_language(source: Random, vocab: int) -> Language:
    """Draw codes, partners and successors."""
    return Language(source.normal(vocab, CODE), source.permutation(vocab), source.permutation(vocab))


def write_only_result(weight: torch.Tensor) -> torch.Tensor:
    """Place rows of an output projection on the result part of the residual stream."""
    placed = torch.zeros(HIDDEN, weight.shape[1])
    placed[RESULT] = weight
    return placed


RESULT_WIDTH = HIDDEN - RESULT.start


def attention_weights(
    model: SmallModel, source: Random, prefix: str, coupling: float, *, shares_topk: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """Draw one MLA layer; also return the map from a latent to what the layer writes.

    `coupling` is how strongly keys and queries also read the result of earlier layers. A layer that shares
    the top-k of another has no indexer.
    """
    read = source.normal(CODE, CODE, std=CODE**-0.5)
    q_a, kv_a = torch.zeros(CODE, HIDDEN), torch.zeros(CODE + model.rope, HIDDEN)
    q_a[:, QUERIES], kv_a[:CODE, KEYS] = read, read
    kv_a[CODE:, KEYS] = source.normal(model.rope, CODE, std=(2 / CODE) ** 0.5)
    for weight in (q_a, kv_a):
        weight[:CODE, RESULT] = source.normal(CODE, RESULT_WIDTH, std=coupling * CODE**-0.5)
    score = source.uniform(model.heads, *MATCH_SCORE)
    std = (score * (model.nope + model.rope) ** 0.5 / (model.nope * CODE)) ** 0.5
    up = source.normal(model.heads, model.nope, CODE) * std[:, None, None]
    q_pe = source.normal(model.heads, model.rope, CODE, std=(2 / CODE) ** 0.5)
    value = source.normal(model.heads, VALUE, CODE, std=CODE**-0.5)
    out = source.normal(RESULT_WIDTH, model.heads * VALUE, std=(model.heads * VALUE) ** -0.5)
    out *= model.mla_layers**-0.5
    weights = {
        "q_a_proj.weight": q_a,
        "q_a_layernorm.weight": torch.ones(CODE),
        "q_b_proj.weight": torch.cat([up, q_pe], 1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": kv_a,
        "kv_a_layernorm.weight": torch.ones(CODE),
        "kv_b_proj.weight": torch.cat([up, value], 1).flatten(0, 1),
        "o_proj.weight": write_only_result(out),
    }
    if not shares_topk:
        weights |= indexer_weights(model, source, read)
    # Codes have unit variance, so the RMSNorm of the latent changes its direction not at all and
    # its length little.
    writes = out @ value.flatten(0, 1) @ read
    return {f"{prefix}.self_attn.{name}": tensor for name, tensor in weights.items()}, writes


def indexer_weights(model: SmallModel, source: Random, read: torch.Tensor) -> Tensors:
    """Draw an indexer that prefers the keys that attention matches."""
    view = source.normal(INDEX_DIM, CODE, std=CODE**-0.5)
    view[: model.rope] *= 0.3  # rotated by the distance, hence of no use for matching
    k = torch.zeros(INDEX_DIM, HIDDEN)
    k[:, KEYS] = view @ read
    heads = view + source.normal(model.index_heads, INDEX_DIM, CODE, std=0.5 * CODE**-0.5)
    gates = source.normal(model.index_heads, HIDDEN, std=0.05 * HIDDEN**-0.5)
    gates[:, CONSTANT] = source.uniform(model.index_heads, 0.5, 1.5) / CONSTANT_VALUE
    weights = {
        "wq_b.weight": heads.flatten(0, 1),
        "wk.weight": k,
        "k_norm.weight": torch.ones(INDEX_DIM),
        "k_norm.bias": torch.zeros(INDEX_DIM),
        "weights_proj.weight": gates,
    }
    if model.is_pooled:
        weights["index_kpool_compress_ape"] = source.normal(KPOOL, INDEX_DIM, std=0.2)
        weights["index_kpool_compress_gate"] = source.normal(INDEX_DIM, HIDDEN, std=0.2 * HIDDEN**-0.5)
    return {f"indexer.{name}": tensor for name, tensor in weights.items()}


def linear_attention_weights(source: Random, prefix: str) -> Tensors:
    """Draw one gated delta (KDA) layer whose result is a small part of the stream."""
    width = LINEAR_HEADS * LINEAR_DIM
    std = HIDDEN**-0.5
    weights = {f"{name}_proj.weight": source.normal(width, HIDDEN, std=std) for name in "qkv"}
    weights |= {
        "b_proj.weight": source.normal(LINEAR_HEADS, HIDDEN, std=std),
        "f_a_proj.weight": source.normal(LINEAR_DIM, HIDDEN, std=std),
        "g_a_proj.weight": source.normal(LINEAR_DIM, HIDDEN, std=std),
        "f_b_proj.weight": source.normal(width, LINEAR_DIM, std=LINEAR_DIM**-0.5),
        "g_b_proj.weight": source.normal(width, LINEAR_DIM, std=LINEAR_DIM**-0.5),
        "dt_bias": source.normal(width),
        "A_log": source.uniform(LINEAR_HEADS, 1.0, 4.0).log(),
        "o_norm.weight": torch.ones(LINEAR_DIM),
        "o_proj.weight": write_only_result(source.normal(RESULT_WIDTH, width, std=0.15 * width**-0.5)),
    }
    for name in "qkv":
        weights[f"{name}_conv1d.weight"] = source.normal(width, 1, CONV, std=CONV**-0.5)
    return {f"{prefix}.self_attn.{name}": tensor for name, tensor in weights.items()}


def mlp_weights(source: Random, prefix: str, width: int) -> Tensors:
    """Draw one gated MLP that adds a little to the result."""
    return {
        f"{prefix}.gate_proj.weight": source.normal(width, HIDDEN, std=HIDDEN**-0.5),
        f"{prefix}.up_proj.weight": source.normal(width, HIDDEN, std=HIDDEN**-0.5),
        f"{prefix}.down_proj.weight": write_only_result(
            source.normal(RESULT_WIDTH, width, std=0.2 * width**-0.5)
        ),
    }


def moe_weights(source: Random, prefix: str) -> Tensors:
    """Draw a router, its experts and the shared expert."""
    weights = mlp_weights(source, f"{prefix}.shared_experts", EXPERT_WIDTH)
    weights[f"{prefix}.gate.weight"] = source.normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5)
    weights[f"{prefix}.gate.e_score_correction_bias"] = source.normal(EXPERTS, std=0.1)
    for expert in range(EXPERTS):
        weights |= mlp_weights(source, f"{prefix}.experts.{expert}", EXPERT_WIDTH)
    return weights


def layer_weights(model: SmallModel, source: Random, index: int) -> tuple[Tensors, torch.Tensor]:
    """Draw one decoder layer; also return the map from a code to what its attention writes."""
    prefix = f"model.layers.{index}"
    writes = torch.zeros(RESULT_WIDTH, CODE)
    kind = model.layers[index]
    if kind != "linear":
        coupling = 0.2 if index else 0.0
        weights, writes = attention_weights(model, source, prefix, coupling, shares_topk=kind == "shared")
    else:
        weights = linear_attention_weights(source, prefix)
    if index:
        weights |= moe_weights(source, f"{prefix}.mlp")
    else:
        weights |= mlp_weights(source, f"{prefix}.mlp", MLP_WIDTH)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN)
    return weights, writes


def make_weights(model: SmallModel, seed: int) -> tuple[Tensors, Language]:
    """Draw all weights in float32 under their checkpoint names, and the language they know."""
    source = Random(seed)
    language = make_language(source, model.vocab)
    embedding = torch.zeros(model.vocab, HIDDEN)
    embedding[:, KEYS] = language.codes
    embedding[:, QUERIES] = language.codes[language.partner]
    embedding[:, CONSTANT] = CONSTANT_VALUE
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    writes = torch.zeros(RESULT_WIDTH, CODE)
    for index in range(len(model.layers)):
        layer, layer_writes = layer_weights(model, source, index)
        weights |= layer
        writes = writes + layer_writes
    results = language.codes[language.partner] @ writes.T
    head = torch.zeros(model.vocab, HIDDEN)
    head[language.successor, RESULT] = results / results.norm(dim=1, keepdim=True)
    weights["lm_head.weight"] = head * (TOP_LOGIT * RESULT_WIDTH**-0.5)
    return weights | draft_weights(model, weights), language


def draft_weights(model: SmallModel, weights: Tensors) -> Tensors:
    """Return the layer for multi-token prediction, made of the last layer."""
    last, prefix = f"model.layers.{len(model.layers) - 1}.", f"model.layers.{len(model.layers)}."
    copied = {
        prefix + name.removeprefix(last): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    only_embedding = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    added = {f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{prefix}eh_proj.weight"] = only_embedding
    if not model.is_pooled:  # GLM-5.3-Flash always takes the model's own
        added[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return copied | added


KEEP_FLOAT32 = ("e_score_correction_bias", "dt_bias", "A_log", "conv1d.weight", "_ape", "k_norm")


def write_model(model: SmallModel, seed: int, folder: Path) -> Language:
    """Write config.json and the checkpoint; return the language for `make_text`."""
    weights, language = make_weights(model, seed)
    stored = {
        name: tensor.contiguous()
        if any(part in name for part in KEEP_FLOAT32)
        else tensor.bfloat16().contiguous()
        for name, tensor in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_configs(model, folder)
    return language


def write_configs(model: SmallModel, folder: Path) -> None:
    """Write config.json, and the folder of the draft model if that has another type."""
    (folder / "config.json").write_text(json.dumps(config(model), indent=1))
    if not model.is_pooled:
        return
    # vLLM finds the drafts of the multimodal type only.
    whole = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": config(model),
    }
    draft = folder / DRAFT_FOLDER
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(whole, indent=1))
    weights = draft / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(folder.resolve() / "model.safetensors")


def make_text(language: Language, length: int, seed: int) -> list[int]:
    """Draw a token sequence: mostly successors, now and then a jump to a random token."""
    rng = random.Random(seed)
    successor = language.successor.tolist()

    def walk() -> Iterator[int]:
        token = rng.randrange(len(successor))
        for _ in range(length):
            yield token
            token = successor[token] if rng.random() < FOLLOW else rng.randrange(len(successor))

    return list(walk())

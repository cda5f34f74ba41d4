"""The same weights twice: as a `glm-dsa` file, and as the bf16 checkpoint that a Hugging Face model has.

The file's weights come from `glm_dsa_files` of the patched plugin's tests, which knows each of them without a
decoder, or from `gguf_language`; the checkpoint holds them rounded to bf16. Nothing of the plugin takes part.

What vLLM keeps in float32 is float32 in the checkpoint, too: rounding the norm of the indexer's keys alone
exchanges 12 of 512 selected keys a position, and moves log-probabilities as far as 8-bit activations do.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from gguf import GGMLQuantizationType as GGMLType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

WHOLE: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
NEXTN: Final = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
FLOAT32: Final = ("indexer.k_norm",)
TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def proof_config() -> Any:
    """Return a config that every sparse backend of an SM90 GPU serves: 64 heads, 32 index heads."""
    return import_module("glm_dsa_files").glm_dsa_config(
        index_n_heads=32,
        index_topk=512,
        max_position_embeddings=8192,
        n_routed_experts=8,
        num_attention_heads=64,
        num_key_value_heads=64,
        num_nextn_predict_layers=0,
        vocab_size=512,
    )


def proof_tensors(config: Any, *, damage: bool = False) -> dict[str, Any]:
    """Return the file's tensors; damaged, one layer's attention output has other weights."""
    tensors: dict[str, Any] = import_module("glm_dsa_files").glm_dsa_tensors(config)
    if damage:
        name = "blk.1.attn_output.weight"  # weights of another type are drawn anew
        tensors[name] = replace(tensors[name], type=GGMLType.Q8_0)
    return tensors


def checkpoint(config: Any, tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights of the checkpoint, without indexers of layers that share a top-k."""
    import torch

    has_indexer = import_module("glm_dsa_files").has_indexer
    values = {name: torch.from_numpy(t.values) for name, t in tensors.items()}
    for name, value in values.items():
        stem, suffix = name.rsplit(".", 1)
        if not stem.startswith("blk."):
            yield f"{TOP[stem]}.{suffix}", value.to(torch.bfloat16)
            continue
        _, layer, part = stem.split(".", 2)
        if "indexer." in part and not has_indexer(config, int(layer)):
            continue
        prefix = f"model.layers.{layer}"
        if part in WHOLE:
            dtype = torch.float32 if part in FLOAT32 else torch.bfloat16
            yield f"{prefix}.{WHOLE[part]}.{suffix}", value.to(dtype)
        else:
            yield from _split_or_joined(values, prefix, stem, part)


def _split_or_joined(
    values: Mapping[str, torch.Tensor], prefix: str, stem: str, part: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a tensor becomes that the checkpoint has in another way, or in the MTP layer only."""
    import torch

    if part == "exp_probs_b":
        yield f"{prefix}.mlp.gate.e_score_correction_bias", values[f"{stem}.bias"]
        return
    value = values[f"{stem}.weight"].to(torch.bfloat16)
    if part in NEXTN:
        yield f"{prefix}.{NEXTN[part]}.weight", value
    elif part in EXPERTS:
        for expert, weight in enumerate(value):
            yield f"{prefix}.mlp.experts.{expert}.{EXPERTS[part]}.weight", weight.clone()
    elif part == "attn_k_b":
        halves = value, values[f"{stem.replace('attn_k_b', 'attn_v_b')}.weight"].to(torch.bfloat16)
        heads = [torch.cat([k.T, v]) for k, v in zip(*halves, strict=True)]
        yield f"{prefix}.self_attn.kv_b_proj.weight", torch.cat(heads)
    elif part != "attn_v_b":
        raise KeyError(stem)
    if part == "nextn.eh_proj":  # the checkpoint has the output head twice, the file once
        yield f"{prefix}.shared_head.head.weight", values["output.weight"].to(torch.bfloat16)


def write_both(folder: Path, config: Any, tensors: dict[str, Any]) -> tuple[Path, Path]:
    """Write file and checkpoint; return the path of the file and the folder of the checkpoint."""
    from safetensors.torch import save_file

    writer = import_module("glm_dsa_files")
    gguf_folder, bf16_folder = folder / "gguf", folder / "bf16"
    for place in (gguf_folder, bf16_folder):
        place.mkdir(parents=True, exist_ok=True)
    path = writer.write_model(gguf_folder, config, tensors=tensors)
    config.save_pretrained(bf16_folder)
    weights = {name: weight.contiguous() for name, weight in checkpoint(config, tensors)}
    save_file(weights, str(bf16_folder / "model.safetensors"), metadata={"format": "pt"})
    return path, bf16_folder

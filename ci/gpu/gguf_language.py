"""The small model of `small_models` that knows a language, as a `glm-dsa` file of Q8_0 with an MTP layer.

Its drafts are accepted most of the time, and the text that it predicts gets likelier the better its
attention works: a file that loads wrong shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np
import small_models
from gguf import GGMLQuantizationType as GGMLType
from gguf_checkpoint import EXPERTS, NEXTN, TOP, WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SEED: Final = 7
MODEL: Final = small_models.MODELS["glm5"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Encoded:
    """A tensor of a file: its bytes or numbers, and the weights that these stand for."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: Array
    values: Array


def encode(name: str, weights: torch.Tensor) -> Encoded:
    """Return a tensor in the type that files have it in: what is small in F32, all else in Q8_0."""
    values = np.ascontiguousarray(weights.float().numpy())
    if values.ndim == 1 or "ffn_gate_inp" in name:
        return Encoded(name, values.shape, GGMLType.F32, values, values)
    data = gguf.quantize(values, GGMLType.Q8_0)
    return Encoded(name, values.shape, GGMLType.Q8_0, data, gguf.dequantize(data, GGMLType.Q8_0))


def language_config() -> Any:
    """Return the model's config as Transformers has it."""
    return import_module("transformers").GlmMoeDsaConfig(**small_models.config(MODEL))


def language_tensors() -> tuple[dict[str, Encoded], small_models.Language]:
    """Return the tensors of the file by name, and the language for `small_models.make_text`."""
    weights, language = small_models.make_weights(MODEL, SEED)
    named = dict(_file_weights(weights))
    return {name: encode(name, named[name]) for name in sorted(named)}, language


def _file_weights(weights: small_models.Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    top = {name: stem for stem, name in TOP.items()}
    parts = {name: part for part, name in (WHOLE | NEXTN).items()}
    for name, weight in weights.items():
        stem, suffix = name.rsplit(".", 1)
        if stem in top:
            yield f"{top[stem]}.{suffix}", weight
            continue
        _, _, layer, part = stem.split(".", 3)
        if suffix == "e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", weight
        elif part in parts:
            yield f"blk.{layer}.{parts[part]}.{suffix}", weight
        elif part == "self_attn.kv_b_proj":
            heads = weight.reshape(MODEL.heads, -1, small_models.CODE)
            yield f"blk.{layer}.attn_k_b.weight", heads[:, : MODEL.nope].transpose(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", heads[:, MODEL.nope :]
        elif part.startswith("mlp.experts.0."):
            yield _experts(weights, int(layer), part.rsplit(".", 1)[1])
        elif not part.startswith("mlp.experts.") and part != "shared_head.head":
            raise KeyError(name)


def _experts(weights: small_models.Tensors, layer: int, kind: str) -> tuple[str, torch.Tensor]:
    import torch

    [part] = [part for part, name in EXPERTS.items() if name == kind]
    prefix = f"model.layers.{layer}.mlp.experts"
    numbers = range(small_models.EXPERTS)
    return f"blk.{layer}.{part}.weight", torch.stack(
        [weights[f"{prefix}.{n}.{kind}.weight"] for n in numbers]
    )

"""Write large `glm-dsa` files of random blocks, one tensor at a time.

The tests of the patched plugin can write such files too, but hold every weight of them; here a tensor is a
few megabytes of valid blocks, repeated. `known_gguf` and `glm_dsa_files` are modules of those tests and have
to be importable.

The weights of a Q4_K group are centred, as those of real files nearly are. With any minimum, the compiled
kernels' products of many tokens are three times as far from exact ones as 8-bit activations alone make them:
they round what the scales multiply, and not what the minima do.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TILE_ROWS: Final = 509
"""A prime, so that no two experts start in the same row of the tile: a wrong expert shows."""

EXPERTS: Final = GGMLType.Q4_K
"""Type of everything that is large; rows of 192 (`attn_k_b`) fit no block of 256 and take Q8_0."""


def wide_config(layers: int, experts: int, **changes: Any) -> Any:
    """Return a config with the widths of GLM-5 and the given numbers of layers and experts."""
    sizes: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "index_topk_freq": 1,
        "max_position_embeddings": 8192,
        "n_routed_experts": experts,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 32000,
    }
    return import_module("transformers").GlmMoeDsaConfig(**{**sizes, **changes})


def wide_tensors(config: Any) -> Mapping[str, Any]:
    """Return the tensors of a file whose large ones are all of one K-quant."""
    tensors = import_module("glm_dsa_files").glm_dsa_tensors(config)
    return {name: _retyped(tensor) for name, tensor in tensors.items()}


def _retyped(tensor: Any) -> Any:
    if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name:
        return tensor
    return replace(tensor, type=EXPERTS if tensor.shape[-1] % 256 == 0 else GGMLType.Q8_0)


def centred(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return blocks of Q4_K with the minima that centre each group's weights: 7.5 steps of its scale."""
    blocks = data.reshape(-1, 144).copy()  # d, dmin (float16), 12 bytes of scales and minima, quants
    blocks[:, 2:4] = (blocks[:, 0:2].copy().view(np.float16) * np.float16(7.5)).view(np.uint8)
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = blocks[:, 12:16] & 15 | blocks[:, 12:16] << 4
    return blocks.reshape(data.shape)


def tiled(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's data, of which only the first rows are drawn and the rest repeats them."""
    rows = int(np.prod(tensor.shape[:-1]))
    if len(tensor.shape) == 1 or rows <= TILE_ROWS:
        data: np.ndarray[Any, Any] = tensor.data
        return centred(data) if tensor.type is GGMLType.Q4_K else data
    tile = replace(tensor, shape=(TILE_ROWS, tensor.shape[-1])).data
    tile = centred(tile) if tensor.type is GGMLType.Q4_K else tile
    repeated = np.resize(tile, (rows, tile.shape[1]))
    return repeated.reshape(*tensor.shape[:-1], -1)


def write_wide(folder: Path, config: Any) -> Path:
    """Write the file and its config.json; return the path of the file."""
    config.save_pretrained(folder)
    path = folder / "wide.gguf"
    writer = gguf.GGUFWriter(path, "glm-dsa")
    tensors = wide_tensors(config)
    for name, tensor in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[tensor.type]
        row = tensor.shape[-1]
        is_float = tensor.type is GGMLType.F32
        shape = tensor.shape if is_float else (*tensor.shape[:-1], row // block * size)
        nbytes = int(np.prod(shape)) * (4 if is_float else 1)
        dtype = np.dtype(np.float32 if is_float else np.uint8)
        writer.add_tensor_info(name, shape, dtype, nbytes, raw_dtype=None if is_float else tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors.values():
        writer.write_tensor_data(tiled(tensor))
    writer.close()
    return path

"""Load a proof's GGUF file and its bf16 checkpoint on a CPU, and compare every parameter of the model.

    python compare_twins.py twin|language FOLDER

Prints one line, `FOUND` and a JSON object: what differs, by model class and whether it is the draft model.
Blocks are decoded by gguf-py. The plugin's test modules and `ci/gpu` have to be importable.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import gguf
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import base_loader, get_model_loader

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN = {"F32", "F16", "BF16"}


def write(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write the model of one step of the proof; return its file and the folder of its checkpoint."""
    checkpoint = import_module("gguf_checkpoint")
    if kind == "twin":
        config = checkpoint.proof_config()
        tensors = checkpoint.proof_tensors(config)
    else:
        language = import_module("gguf_language")
        config, tensors = language.language_config(), language.language_tensors()[0]
    written: tuple[Path, Path] = checkpoint.write_both(folder, config, tensors)
    return written


def load_checkpoint(config: Any, model_class: type, *, draft: bool) -> torch.nn.Module:
    """Load the checkpoint as `cpu_models.load_model` loads a file."""
    models = import_module("cpu_models")
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    initialize = partial(base_loader.initialize_model, model_class=model_class)
    with (
        set_current_vllm_config(config),
        patch.object(models.mla_attention, "get_attn_backend", lambda *_, **__: models._StubBackend),
        patch.object(base_loader, "initialize_model", initialize),
        patch.object(base_loader, "process_weights_after_loading", lambda *_: None),
        patch.object(torch.accelerator, "empty_cache", lambda: None),
    ):
        loader = get_model_loader(config.load_config)
        model: torch.nn.Module = loader.load_model(vllm_config=config, model_config=model_config)
    return model


def decode(blocks: torch.Tensor, number: int) -> torch.Tensor:
    """Return the weights of blocks in the dtype that a checkpoint's have."""
    kind = gguf.GGMLQuantizationType(number)
    if kind.name in PLAIN:
        return blocks
    rows = blocks.contiguous().numpy().reshape(-1, blocks.shape[-1])
    weights: torch.Tensor = torch.from_numpy(gguf.dequantize(rows, kind))
    return weights.to(torch.bfloat16).reshape(*blocks.shape[:-1], -1)


def decoded(params: dict[str, Any], name: str) -> torch.Tensor:
    """Return the weights that the file's model has for a parameter of the checkpoint's."""
    if name in params:
        whole: torch.Tensor = params[name].data
        return whole
    place = name.rfind("weight")
    quantized = name[:place] + "q" + name[place:]
    blocks, types = params[quantized], params[f"{quantized}_type"]
    if not hasattr(blocks, "shard_offset_map"):
        return decode(blocks.data, types.weight_type)
    parts = []
    for number, kind in sorted(types.shard_weight_type.items()):
        start, end, width = blocks.shard_offset_map[number]
        parts.append(decode(blocks.data[start:end, :width], kind))
    return torch.cat(parts)


def differences(
    file_model: torch.nn.Module, model: torch.nn.Module, left_out: tuple[str, ...]
) -> Iterator[str]:
    """Yield what the models hold in different ways."""
    params = dict(file_model.named_parameters())
    for name, param in model.named_parameters():
        if name.startswith(left_out):
            continue
        found = decoded(params, name)
        if found.dtype != param.dtype:
            yield f"{name} is of {found.dtype} and {param.dtype}"
        elif not torch.equal(found, param.data):
            yield f"{name} differs by up to {(found.float() - param.data.float()).abs().max():.2g}"


def main() -> None:
    """Compare and print."""
    models, reference = import_module("cpu_models"), import_module("glm_dsa_reference")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    path, twin = write(kind, folder)
    options = reference.MTP if kind == "language" else {}
    roles = {"model": reference.MODEL_CLASSES} | ({"draft": reference.DRAFT_CLASSES} if options else {})
    found = {}
    for role, classes in roles.items():
        for label, model_class in classes.items():
            draft = role == "draft"
            left_out = reference.FROM_TARGET if draft else ()
            config = models.engine_config(path, twin, **options)
            file_model = models.load_model(config, model_class, draft=draft)
            model = load_checkpoint(models.engine_config(twin, twin, **options), model_class, draft=draft)
            names = [name for name, _ in model.named_parameters()]
            found[f"{label} {role}"] = {
                "parameters": len(names),
                "different": list(differences(file_model, model, left_out)),
            }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()

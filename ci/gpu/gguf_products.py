"""Compare the plugin's products, compiled and Triton, with products of weights that gguf-py decodes.

    python gguf_products.py RESULT.json

Each type at widths of GLM-5: matrices, and 256 experts in more than 2 GiB, of which experts on both sides of
every 2 GiB are used; what one of 8 ranks has of a down projection, whose rows are single blocks of K-quants;
300 experts; and more tokens than a grid of the compiled kernels has room for. The
relative error of each row (of its norm) may be 0.05: 8-bit activations and bf16 weights make less than 0.02,
a wrong block of a row 0.2, a wrong expert 1. Exits 1 if one is larger or a product fails; the others run.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gguf
import torch
from gguf import GGMLQuantizationType as GGMLType

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWED: Final = 0.05
DEVICE: Final = "cuda"
SCALES: Final = {
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.Q8_0: (0,),
    GGMLType.IQ4_XS: (0,),
}
"""Where a block has numbers in float16; every other byte may be anything."""

HIDDEN: Final = 6144
EIGHTH: Final = 256
"""Columns of a down projection of experts on one of 8 ranks."""

LINEAR: Final = (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q8_0)


@dataclass(frozen=True)
class Experts:
    """A layer of experts and how it is used.

    Attributes:
        kind: Type of the weights.
        shape: Number of experts, rows and columns of each.
        used: Experts that tokens choose.
        tokens: Tokens, each of `top_k` experts.
        top_k: Experts of a token.
        vector: Whether the product for few tokens, or for types without another, is used.

    """

    kind: GGMLType
    shape: tuple[int, int, int]
    used: tuple[int, ...]
    tokens: int
    top_k: int = 2
    vector: bool = False


BOTH_SIDES: Final = (0, 1, 150, 152, 153, 255)
EXPERTS: Final = {
    "gate and up, 3.6 GB": Experts(GGMLType.Q4_K, (256, 4096, 6144), BOTH_SIDES, 100),
    "gate and up, decode": Experts(GGMLType.Q4_K, (256, 4096, 6144), BOTH_SIDES, 3, vector=True),
    "down, 2.6 GB": Experts(GGMLType.Q6_K, (256, 6144, 2048), (0, 207, 208, 255), 100),
    "gate and up, 6.8 GB": Experts(GGMLType.Q8_0, (256, 4096, 6144), (0, 80, 81, 161, 255), 70),
    "down of 8 ranks": Experts(GGMLType.Q6_K, (256, HIDDEN, EIGHTH), BOTH_SIDES, 100),
    "down of 8 ranks, decode": Experts(GGMLType.Q4_K, (256, HIDDEN, EIGHTH), BOTH_SIDES, 3, vector=True),
    "300 experts": Experts(GGMLType.Q4_K, (300, 256, 512), (0, 255, 256, 299), 100),
    "a grid that is full": Experts(GGMLType.IQ4_XS, (8, 256, 512), tuple(range(8)), 8192, 8, vector=True),
}


def random_blocks(kind: GGMLType, *shape: int) -> torch.Tensor:
    """Return valid blocks for weights of a shape."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = (*shape[:-1], shape[-1] // block, size)
    blocks = torch.randint(256, stored, dtype=torch.uint8, device=DEVICE)
    for start in SCALES[kind]:
        scales = torch.rand(*stored[:-1], 1, dtype=torch.float16, device=DEVICE) + 0.5
        blocks[..., start : start + 2] = scales.view(torch.uint8)
    return blocks.flatten(-2)


def weights_of(blocks: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """Decode the blocks of a matrix with gguf-py."""
    return torch.from_numpy(gguf.dequantize(blocks.cpu().numpy(), kind)).to(DEVICE).double()


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a row, by its norm."""
    return float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def linear_error(ops: Any, kind: GGMLType, tokens: int, columns: int) -> float:
    """Return the error of a product with a matrix."""
    blocks = random_blocks(kind, 2112, columns)
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device=DEVICE)
    multiply = ops.ggml_mul_mat_vec_a8 if tokens <= 4 else ops.ggml_mul_mat_a8
    found = multiply(blocks, x, int(kind), blocks.shape[0])
    return error_of(found, x.double() @ weights_of(blocks, kind).T)


def experts_error(ops: Any, align: Callable[..., Any], experts: Experts, blocks: torch.Tensor) -> float:
    """Return the error of a product with experts."""
    kind, rows, top_k = int(experts.kind), experts.shape[1], experts.top_k
    x = torch.randn(experts.tokens, experts.shape[2], dtype=torch.bfloat16, device=DEVICE)
    used = torch.tensor(experts.used, dtype=torch.int32, device=DEVICE)
    ids = used[torch.rand(experts.tokens, len(used), device=DEVICE).argsort(1)[:, :top_k]].contiguous()
    if experts.vector:
        found = ops.ggml_moe_a8_vec(x, blocks, ids, top_k, kind, rows, experts.tokens)
    else:
        aligned = align(ids, ops.ggml_moe_get_block_size(kind), experts.shape[0])
        found = ops.ggml_moe_a8(x, blocks, *aligned, kind, rows, top_k, experts.tokens)
    expected = torch.zeros(experts.tokens * top_k, rows, dtype=torch.float64, device=DEVICE)
    flat = ids.flatten()
    for expert in experts.used:
        [slots] = (flat == expert).nonzero(as_tuple=True)
        expected[slots] = x.double()[slots // top_k] @ weights_of(blocks[expert], experts.kind).T
    return error_of(found, expected)


def attempt(measure: Callable[[], float]) -> dict[str, Any]:
    """Measure an error; return it, or what went wrong."""
    started = time.monotonic()
    try:
        error = measure()
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - reported, and fails the step
        return {"failed": traceback.format_exc()}
    return {"error": error, "seconds": time.monotonic() - started}


def measure_all(ops: Any, align: Callable[..., Any], available: dict[str, bool]) -> dict[str, Any]:
    """Return the errors of all products with all kernels that are there."""
    found: dict[str, Any] = {}
    for kernels, there in available.items():
        ops._CUDA_ENABLED = kernels == "compiled"
        if not there:
            found[kernels] = {"all": {"failed": "the kernels cannot be imported"}}
            continue
        found[kernels] = {
            f"{kind.name}, {tokens} tokens, {columns} columns": attempt(
                partial(linear_error, ops, kind, tokens, columns)
            )
            for kind in LINEAR
            for columns, counts in ((HIDDEN, (1, 4, 33, 300)), (EIGHTH, (4, 33)))
            for tokens in counts
        }
        for name, experts in EXPERTS.items():
            blocks = random_blocks(experts.kind, *experts.shape)
            found[kernels][name] = attempt(partial(experts_error, ops, align, experts, blocks))
            del blocks
    return found


def main() -> int:
    """Measure and write the report."""
    from vllm.model_executor.layers.fused_moe.fused_moe import moe_align_block_size
    from vllm_gguf_plugin import ops

    torch.manual_seed(0)
    available = {"triton": True, "compiled": ops._cuda_kernel_available("ggml_moe_a8")}
    found = measure_all(ops, moe_align_block_size, available)
    wrong = [
        f"{kernels}: {name}"
        for kernels, products in found.items()
        for name, product in products.items()
        if not product.get("error", 1.0) <= ALLOWED
    ]
    Path(sys.argv[1]).write_text(json.dumps({"products": found, "problems": wrong}, indent=1))
    print("\n".join(wrong) or "all products are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

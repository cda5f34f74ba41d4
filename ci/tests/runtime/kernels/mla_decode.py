"""Inputs for vLLM's Triton decode attention: meta tensors to compile with, and a reference."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

UPSTREAM_VARIABLE = "KERNELCHECK_UPSTREAM"
"""Folder of the unpatched sources of the pinned release, such as the unpacked sdist."""

MODULE = "vllm/v1/attention/ops/triton_decode_attention.py"


@dataclass(frozen=True)
class Shape:
    """What decides how the decode kernels are compiled."""

    name: str
    head_dim: int
    """Latent and RoPE values of a key (``Lk``)."""
    value_dim: int
    """Values of a value vector; with MLA the first ones of the key (``Lv``)."""
    heads: int
    kv_heads: int
    page: int
    """Tokens of a page of the cache."""
    query: torch.dtype
    cache: torch.dtype

    @property
    def is_mla(self) -> bool:
        """One latent vector serves all heads, as key and as value."""
        return self.kv_heads == 1


_BF16, _FP16, _FP32, _FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

SHAPES = (
    Shape("DeepSeek, fp8 cache", 576, 512, 128, 1, 64, _BF16, _FP8),
    Shape("DeepSeek, fp8 cache, fp16, page 1", 576, 512, 16, 1, 1, _FP16, _FP8),
    Shape("DeepSeek, bf16 cache", 576, 512, 8, 1, 64, _BF16, _BF16),
    Shape("DeepSeek, fp32", 576, 512, 16, 1, 16, _FP32, _FP32),
    Shape("no RoPE, fp8 cache", 512, 512, 64, 1, 64, _BF16, _FP8),
    Shape("latent 256, fp8 cache", 288, 256, 40, 1, 16, _BF16, _FP8),
    Shape("GQA 576, fp8 cache", 576, 512, 32, 8, 16, _BF16, _FP8),
    Shape("MHA 128, fp8 cache", 128, 128, 32, 32, 16, _BF16, _FP8),
)


def _load(path: Path) -> ModuleType:
    """Import one file under a name of its own, beside the installed module."""
    spec = importlib.util.spec_from_file_location("upstream_triton_decode_attention", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def upstream_module() -> ModuleType:
    """Return the unpatched module of the pinned release.

    Raises:
        RuntimeError: ``KERNELCHECK_UPSTREAM`` does not name a folder that holds it.
    """
    path = Path(os.environ.get(UPSTREAM_VARIABLE, ""), MODULE)
    if not path.is_file():
        raise RuntimeError(
            f"set {UPSTREAM_VARIABLE} to the unpatched sources of the pinned release; {path} is not a file"
        )
    return _load(path)


def patched_module() -> Any:
    """Return the module of the installed vLLM; untyped, for it is the code under test."""
    return import_module("vllm.v1.attention.ops.triton_decode_attention")


def _launch_on_meta(module: ModuleType, shape: Shape) -> None:
    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    batch, splits, pages = 3, 4, 32
    keys = empty(pages, shape.page, shape.kv_heads, shape.head_dim, dtype=shape.cache)
    values = keys[..., : shape.value_dim]
    if not shape.is_mla:
        values = empty(pages, shape.page, shape.kv_heads, shape.value_dim, dtype=shape.cache)
    module.decode_attention_fwd(
        empty(batch, shape.heads, shape.head_dim, dtype=shape.query),
        keys,
        values,
        empty(batch, shape.heads, shape.value_dim, dtype=shape.query),
        empty(batch, shape.heads, dtype=shape.query),
        empty(batch, 32, dtype=torch.int32),
        empty(batch, dtype=torch.int32),
        empty(batch, shape.heads, splits, shape.value_dim + 1),
        splits,
        0.1,
        shape.page,
        k_scale=empty(1)[0],
        v_scale=empty(1)[0],
        is_mla=shape.is_mla,
    )


def every_case() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each shape with the upstream launcher ("before: …") and the installed one."""
    before, after = upstream_module(), patched_module()
    for shape in SHAPES:
        yield f"before: {shape.name}", partial(_launch_on_meta, before, shape)
        yield f"after: {shape.name}", partial(_launch_on_meta, after, shape)


@dataclass(frozen=True)
class Problem:
    """Random inputs of one decode step, on the CPU."""

    shape: Shape
    lengths: list[int]
    """Tokens in the cache of each request."""
    query: torch.Tensor
    """``[requests, heads, head_dim]``."""
    keys: torch.Tensor
    """``[pages, page, kv_heads, head_dim]`` in the cache's type; page 0 is poisoned with NaN."""
    values: torch.Tensor
    """``[pages, page, kv_heads, value_dim]``; with MLA a view of the keys."""
    table: torch.Tensor
    """``[requests, most pages]`` page numbers in random order, 0 after a request's last."""
    key_scale: torch.Tensor
    value_scale: torch.Tensor

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits."""
        return float(self.shape.head_dim**-0.5)

    def run(self, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp of the installed launcher, whose outputs begin as NaN."""
        shape, batch = self.shape, len(self.lengths)
        out = torch.full((batch, shape.heads, shape.value_dim), torch.nan, dtype=shape.query)
        lse = torch.full((batch, shape.heads), torch.nan)
        scratch = torch.full((batch, shape.heads, splits, shape.value_dim + 1), torch.nan)
        patched_module().decode_attention_fwd(
            self.query,
            self.keys,
            self.values,
            out,
            lse,
            self.table,
            torch.tensor(self.lengths, dtype=torch.int32),
            scratch,
            splits,
            self.softmax_scale,
            shape.page,
            k_scale=self.key_scale,
            v_scale=self.value_scale,
            is_mla=shape.is_mla,
        )
        return out, lse

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what :meth:`run` should, computed in float64 from the same cache."""
        parts = [
            attend(
                self.query[row],
                self._tokens(self.keys, self.key_scale, row),
                self._tokens(self.values, self.value_scale, row),
                self.softmax_scale,
            )
            for row in range(len(self.lengths))
        ]
        return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])

    def logits_error(self) -> float:
        """Return how far any logit of :meth:`run` may lie from that of :meth:`reference`.

        With one query head per KV head the kernel works in the type of the query: each product, their sum,
        the scale and its product are rounded once. Else logits are exact products summed in float32.
        """
        if self.shape.heads != self.shape.kv_heads:
            return 1e-5
        keys = [self._tokens(self.keys, self.key_scale, row).float() for row in range(len(self.lengths))]
        largest = max((query * key).abs().sum(-1).max() for query, key in zip(self.query, keys, strict=True))
        return 4 * torch.finfo(self.shape.query).eps / 2 * self.softmax_scale * float(largest)

    def largest_value(self) -> float:
        """Return the largest absolute value that is attended to."""
        rows = range(len(self.lengths))
        return max(float(self._tokens(self.values, self.value_scale, row).abs().max()) for row in rows)

    def _tokens(self, cache: torch.Tensor, scale: torch.Tensor, row: int) -> torch.Tensor:
        """Return one request's rows; fp8 is dequantised to the query's type, as the kernel does."""
        length = self.lengths[row]
        pages = self.table[row, : -(-length // self.shape.page)].long()
        wide = cache[pages].float().flatten(0, 1)[:length]
        return (wide * scale).to(self.shape.query) if self.shape.cache == _FP8 else wide


def draw_problem(shape: Shape, lengths: list[int]) -> Problem:
    """Draw inputs from torch's generator."""
    used = [-(-length // shape.page) for length in lengths]
    size = (1 + sum(used), shape.page, shape.kv_heads)
    keys = torch.randn(*size, shape.head_dim).to(shape.cache)
    values = keys[..., : shape.value_dim]
    if not shape.is_mla:
        values = torch.randn(*size, shape.value_dim).to(shape.cache)
    keys[0] = torch.nan
    values[0] = torch.nan
    order = 1 + torch.randperm(sum(used)).int()
    owned = [order[sum(used[:row]) :][:count] for row, count in enumerate(used)]
    return Problem(
        shape=shape,
        lengths=lengths,
        query=torch.randn(len(lengths), shape.heads, shape.head_dim).to(shape.query),
        keys=keys,
        values=values,
        table=torch.nn.utils.rnn.pad_sequence(owned, batch_first=True),
        key_scale=torch.tensor(0.37),
        value_scale=torch.tensor(0.37 if shape.is_mla else 0.61),
    )


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query to all keys, in float64.

    Args:
        query: ``[heads, head_dim]``.
        keys: ``[tokens, kv_heads, head_dim]``, dequantised.
        values: ``[tokens, kv_heads, value_dim]``, dequantised.
        scale: Factor of the logits.

    Returns:
        Output ``[heads, value_dim]`` and natural log-sum-exp ``[heads]``.
    """
    group = query.shape[0] // keys.shape[1]
    wide_keys = keys.double().repeat_interleave(group, dim=1)
    wide_values = values.double().repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,thd->ht", query.double(), wide_keys) * scale
    output = torch.einsum("ht,thd->hd", logits.softmax(-1), wide_values)
    return output, logits.logsumexp(-1)

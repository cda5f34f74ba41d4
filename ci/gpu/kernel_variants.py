"""Compile the variants of the sparse-MLA kernels through the product's own warm-up, in many processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import standalone
import torch

Job = tuple[str, dict[str, Any], str | None]
"""A wrapper's name, the fields of a variant with dtypes by name, and the kernels' checkout."""


def job_of(kernels: Any, variant: Any, root: Path | None) -> Job:
    """Return a variant in a form that another process can be sent."""
    fields = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in asdict(variant).items()
    }
    (wrapper,) = (n for n in standalone.WRAPPERS if isinstance(variant, getattr(kernels, n).CompileKey))
    return wrapper, fields, None if root is None else str(root)


def key_of(wrapper: Any, fields: dict[str, Any]) -> Any:
    """Return the variant of a wrapper that `job_of` took apart."""
    dtypes = {name: getattr(torch, fields[name]) for name in ("dtype", "fp8_words") if name in fields}
    return type(wrapper).CompileKey(**(fields | dtypes))


def compile_here(wrapper: Any, fields: dict[str, Any]) -> None:
    """Make a variant that `job_of` took apart available in this process, through the product's warm-up."""
    wrapper.compile(key_of(wrapper, fields))


def compile_variant(job: Job) -> None:
    """Compile one variant into the disk cache, in a worker process."""
    name, fields, root = job
    compile_here(getattr(standalone.load_kernel(None if root is None else Path(root)), name), fields)


def warm_up(kernels: Any, variants: set[Any], root: Path | None, processes: int) -> None:
    """Compile all variants in parallel, then load them here."""
    jobs = [job_of(kernels, variant, root) for variant in variants]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_variant, jobs, chunksize=1)
    for variant, (name, _, _) in zip(variants, jobs, strict=True):
        getattr(kernels, name).compile(variant)


def compiled_count(kernels: Any) -> int:
    """Number of binaries that Triton holds for the kernels."""
    wrappers = [getattr(kernels, name) for name in standalone.WRAPPERS]
    return sum(len(w.kernel.device_caches[torch.cuda.current_device()][0]) for w in wrappers)

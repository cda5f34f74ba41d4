"""Pytest plugin: run upstream's tests of Triton kernels in Triton's interpreter, on the CPU.

Loaded with ``-p interpret_plugin`` in a process that has ``TRITON_INTERPRET=1``. On top of
:mod:`pretend_plugin` it sends every tensor of a test to the CPU, whatever device it asks for, and
gives the index groups, which would overlap a conversion on a second stream, streams and events
that do nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.overrides import TorchFunctionMode

from kernelcheck import interpreter
from kernelcheck.platform import skip_package_init

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

import_module("pretend_plugin")  # for its effect, before anything of vLLM is imported
interpreter.install()
skip_package_init("vllm.models.glm5next")


def _on_cpu(value: Any) -> Any:
    """Return the CPU for anything that names a CUDA device, and other values unchanged."""
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    is_name = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda or is_name else value


class OnCpu(TorchFunctionMode):
    """Replaces the CUDA device in the arguments of every function of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with the CPU wherever it was given a CUDA device."""
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)  # only an accelerator's driver can pin
        if func is torch.device:
            return func(*args, **named)
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*map(_on_cpu, args), **named)


class NoStream:
    """A stream and event of one: everything on the CPU is in order already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, _: object = None) -> None:
        """Do nothing."""

    wait_event = wait_stream = record


def _use_no_streams() -> None:
    index_group: Any = import_module("vllm.v1.attention.backends.mla.index_group")
    index_group._create_side_stream = lambda _: NoStream()
    index_group._create_event = NoStream
    index_group.current_stream = NoStream


torch.accelerator.synchronize = lambda *_: None  # launches return when they are done
ON_CPU: Any = OnCpu()
ON_CPU.__enter__()
_use_no_streams()

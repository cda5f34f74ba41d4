"""Make bfloat16 and fp8 value-correct in Triton's interpreter (test only).

Triton 3.8.0 interprets kernels with numpy, which has neither type. It keeps a bfloat16 as its
16-bit pattern and computes on the pattern, truncates float32 to bfloat16, and rounds float32 to fp8
differently from every GPU in some codes. :func:`install` changes that:

* a bfloat16 value is carried as the float32 of the same value, and every result of that type is
  rounded to the nearest bfloat16, ties to even, as one GPU instruction does;
* an fp8 value stays its 8-bit code, and all its conversions are torch's.

Torch turns a float32 beyond the range of e4m3 into NaN where a GPU's saturating conversion gives
the largest value; a kernel under test has to clamp first, as vLLM's do.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_Array = NDArray[Any]

_TORCH_TYPES: Final = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
}
_CODES: Final = {1: torch.uint8, 2: torch.uint16}

_stock_dtype = interpreter._get_np_dtype
_stock_fits = interpreter._validate_np_data_size
_stock_mx_values = interpreter._mxfp_value_handle_to_float32
_stock_check = interpreter.TensorHandle.__post_init__
_stock_launch = interpreter.GridExecutor.__call__


def encode(values: _Array, dtype: tl.dtype) -> _Array:
    """Round ``values`` to the codes (unsigned integers) of ``dtype``, a bfloat16 or fp8 type."""
    kind = _TORCH_TYPES[dtype]
    narrow = torch.from_numpy(np.array(values, dtype=np.float32)).to(kind)
    return np.asarray(narrow.view(_CODES[kind.itemsize]).numpy())


def decode(codes: _Array, dtype: tl.dtype) -> _Array:
    """Return the float32 values of ``codes``, unsigned integers of a bfloat16 or fp8 type."""
    kind = _TORCH_TYPES[dtype]
    return np.asarray(torch.from_numpy(np.array(codes)).view(kind).float().numpy())


def _values(handle: Any) -> _Array:
    """Return what a handle stands for: decoded if it is an fp8 code, else the data itself."""
    kind = handle.dtype.scalar
    data: _Array = handle.data
    return decode(data, kind) if kind in _TORCH_TYPES and kind != tl.bfloat16 else data


def _pattern(handle: Any) -> _Array:
    """Return what memory holds for a handle: bfloat16 as its 16-bit pattern, else the data."""
    data: _Array = handle.data
    return encode(data, tl.bfloat16) if handle.dtype.scalar == tl.bfloat16 else data


def _from_pattern(pattern: _Array, dtype: tl.dtype) -> Any:
    """Make a handle from what memory holds, the inverse of :func:`_pattern`."""
    data = decode(pattern, dtype) if dtype == tl.bfloat16 else pattern
    return interpreter.TensorHandle(data, dtype)


def _carrier_dtype(dtype: tl.dtype) -> Any:
    return np.dtype(np.float32) if dtype.scalar == tl.bfloat16 else _stock_dtype(dtype)


def _carrier_fits(data: _Array, dtype: tl.dtype) -> bool:
    carried = dtype.scalar == tl.bfloat16 and data.dtype == np.float32
    return carried or bool(_stock_fits(data, dtype))


def _round_and_check(self: Any) -> None:
    """Uphold the invariant: a float32 carrier of bfloat16 holds a representable value."""
    if self.dtype.scalar == tl.bfloat16 and self.data.dtype == np.float32:
        self.data = decode(encode(self.data, tl.bfloat16), tl.bfloat16)
    _stock_check(self)


def _mx_values(handle: Any) -> _Array:
    is_known = handle.dtype.scalar in _TORCH_TYPES
    return _values(handle) if is_known else np.asarray(_stock_mx_values(handle))


def _launch_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
    """Launch without numpy's warnings: a GPU computes masked lanes silently, infinities and all."""
    with np.errstate(all="ignore"):
        _stock_launch(self, *args, **kwargs)


def _constexpr_positions(self: Any) -> list[int]:
    """Return what a compiled function calls ``constexprs``; vLLM's launchers count them."""
    parameters = inspect.signature(self.fn).parameters.values()
    return [i for i, one in enumerate(parameters) if "constexpr" in str(one.annotation)]


class ValueBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's operations, with the ones that look at bits of bfloat16 or fp8 replaced."""

    def get_bf16(self, value: float) -> Any:
        """Return a bfloat16 scalar."""
        return interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.bfloat16)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        """Load, bfloat16 through its 16-bit pattern."""
        dtype = ptrs.get_element_ty()
        stored = _stock_dtype(dtype)
        fill = np.zeros(ptrs.data.shape, stored) if other is None else _pattern(other)
        return _from_pattern(interpreter._interpreter.load(ptrs.data, mask.data, fill, stored), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
        """Store, bfloat16 as its 16-bit pattern."""
        return interpreter._interpreter.store(ptrs.data, _pattern(value), mask.data)

    def create_bitcast(self, src: Any, dst_type: tl.dtype) -> Any:
        """Reinterpret the bits that memory would hold."""
        return _from_pattern(_pattern(src).view(_stock_dtype(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    def create_fp_to_fp(self, src: Any, dst_type: tl.dtype, rounding_mode: Any) -> Any:
        """Convert between floating-point types, rounding to nearest even.

        Raises:
            NotImplementedError: Another rounding, or a type that torch does not have.
        """
        kinds = {src.dtype.scalar, dst_type.scalar}
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ or tl.float8e4b15 in kinds:
            raise NotImplementedError(f"{src.dtype} to {dst_type}, rounding {rounding_mode}")
        return self.cast_impl(src, dst_type)

    def cast_impl(self, src: Any, dst_type: tl.dtype) -> Any:
        """Convert by value; :class:`TensorHandle` rounds a bfloat16 result."""
        dst, values = dst_type.scalar, _values(src)
        is_fp8 = dst in _TORCH_TYPES and dst != tl.bfloat16
        data = encode(values, dst) if is_fp8 else values.astype(_carrier_dtype(dst))
        return interpreter.TensorHandle(data, dst)

    def create_fabs(self, arg: Any) -> Any:
        """Absolute value; the stock version masks a sign bit that a carrier has elsewhere."""
        if arg.dtype.scalar != tl.bfloat16:
            return super().create_fabs(arg)
        return interpreter.TensorHandle(np.abs(arg.data), tl.bfloat16)

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Multiply the operands' values in the accumulator's type."""
        data = np.matmul(_values(a), _values(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(data, d.dtype.scalar)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, *rest: Any) -> Any:
        """Refuse bfloat16, on which the stock version would add 16-bit integers.

        Raises:
            NotImplementedError: The value is bfloat16.
        """
        if val.dtype.scalar == tl.bfloat16:
            raise NotImplementedError("atomic operation on bfloat16")
        return super().create_atomic_rmw(op, ptr, val, *rest)


def install() -> None:
    """Make the interpreter of this process value-correct; installing twice changes nothing.

    Raises:
        RuntimeError: Triton compiles in this process: ``TRITON_INTERPRET=1`` was not set in time.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before the process imports triton")
    interpreter.interpreter_builder.__class__ = ValueBuilder
    interpreter._get_np_dtype = _carrier_dtype
    interpreter._validate_np_data_size = _carrier_fits
    interpreter._mxfp_value_handle_to_float32 = _mx_values
    interpreter.TensorHandle.__post_init__ = _round_and_check
    interpreter.GridExecutor.__call__ = _launch_quietly
    interpreter.InterpretedFunction.constexprs = property(_constexpr_positions)

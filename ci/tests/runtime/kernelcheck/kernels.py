"""Small kernels with which the harness is tested; one operation each, so that a fault has a name.

Parameters other than constexprs are unannotated: Triton would read an annotation as their type.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr) -> None:
    """Load and store, converting between the types of the two pointers."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + offsets, mask=offsets < size, other=0.0)
    tl.store(target + offsets, values.to(target.dtype.element_ty), mask=offsets < size)


@triton.jit
def bitcast_kernel(source, target, size, BLOCK: tl.constexpr) -> None:
    """Load and store the same bits under the type of the target."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(source + offsets, mask=offsets < size)
    tl.store(target + offsets, bits.to(target.dtype.element_ty, bitcast=True), mask=offsets < size)


@triton.jit
def arithmetic_kernel(left, right, out, size, OPERATION: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Apply one operation to two vectors in their own type."""
    offsets = tl.arange(0, BLOCK)
    a = tl.load(left + offsets, mask=offsets < size, other=0.0)
    b = tl.load(right + offsets, mask=offsets < size, other=0.0)
    if OPERATION == "add":
        result = a + b
    elif OPERATION == "multiply":
        result = a * b
    elif OPERATION == "maximum":
        result = tl.maximum(a, b)
    elif OPERATION == "where":
        result = tl.where(a < b, a, b)
    elif OPERATION == "negate":
        result = -a
    elif OPERATION == "constant":
        result = a + tl.full([BLOCK], 0.5, a.dtype)
    else:
        result = tl.abs(a)
    tl.store(out + offsets, result, mask=offsets < size)


@triton.jit
def dot_kernel(left, right, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr) -> None:
    """Multiply an M x K by a K x N matrix with a float32 accumulator."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + rows[:, None] * K + inner[None, :])
    b = tl.load(right + inner[:, None] * N + columns[None, :])
    tl.store(out + rows[:, None] * N + columns[None, :], tl.dot(a, b))


@triton.jit
def row_sum_kernel(source, out, M: tl.constexpr, N: tl.constexpr) -> None:
    """Sum and maximum of each row of an M x N matrix, in float32."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    values = tl.load(source + rows[:, None] * N + columns[None, :])
    tl.store(out + rows, tl.sum(values.to(tl.float32), 1) + tl.max(values, 1))


@triton.jit
def exchange_kernel(target) -> None:
    """Add one atomically, in the type of the target."""
    tl.atomic_add(target, tl.full([], 1.0, target.dtype.element_ty))


@triton.jit
def specialised_kernel(aligned, shifted, one, many, odd, FACTOR: tl.constexpr) -> None:
    """Take an argument of every kind that Triton specialises."""
    offset = tl.program_id(0) * many + odd
    tl.store(shifted + offset * one, tl.load(aligned + offset).to(tl.float32) * FACTOR)


@triton.jit
def wide_dot_kernel(left, right, out, count, N: tl.constexpr) -> None:
    """Sum ``count`` products of 16 x N by N x N matrices: pipelined, needs shared memory."""
    rows, columns = tl.arange(0, 16), tl.arange(0, N)
    total = tl.zeros([16, N], tl.float32)
    for step in tl.range(0, count):
        a = tl.load(left + step * 16 * N + rows[:, None] * N + columns[None, :])
        b = tl.load(right + step * N * N + columns[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(out + rows[:, None] * N + columns[None, :], total)

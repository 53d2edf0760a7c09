"""float16 in registers: Numba has none on the CPU, so these intrinsics hand LLVM the conversion instruction."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "accumulate", "dot", "load", "prefetch"]

LANES = 32
"""Elements that `dot` takes at a time; rows are padded to a multiple of it."""


@intrinsic
def load(typingctx: Any, data: Any, index: Any) -> Any:
    """Read ``data[index]`` as float32, exactly: the bits of a float16 (uint16 array) or a float32; unchecked."""
    signature = types.float32(data, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        value = builder.load(builder.gep(array.data, [args[1]]))
        if signature.args[0].dtype == types.uint16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return value

    return signature, codegen


@intrinsic
def prefetch(typingctx: Any, data: Any, index: Any) -> Any:
    """Ask for the cache line of ``data[index]``; harmless beyond the end of the array."""
    signature = types.void(data, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word]), "llvm.prefetch.p0"
        )
        builder.call(function, [pointer, ir.Constant(word, 0), ir.Constant(word, 2), ir.Constant(word, 1)])
        return context.get_dummy_value()

    return signature, codegen


def _vector(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> tuple[Any, Any]:
    """Load `LANES` elements of an array as a vector of float32; give it and its address."""
    element, bytes_each = (ir.HalfType(), 2) if kind.dtype == types.uint16 else (ir.FloatType(), 4)
    pointer = context.make_array(kind)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(pointer, [index]), ir.VectorType(element, LANES).as_pointer())
    value = builder.load(pointer, align=bytes_each)
    if bytes_each == 2:
        value = builder.fpext(value, ir.VectorType(ir.FloatType(), LANES))
    return value, pointer


@intrinsic
def dot(typingctx: Any, data: Any, base: Any, weights: Any, start: Any) -> Any:
    """Sum ``data[base + k] * weights[start + k]`` over `LANES` elements in float32, in any order.

    `data` is a uint16 array (float16 bits) or a float32 one, `weights` float32; neither index is checked.
    """
    signature = types.float32(data, types.intp, weights, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _vector(context, builder, signature.args[0], args[0], args[1])[0]
        product = builder.fmul(x, _vector(context, builder, signature.args[2], args[2], args[3])[0])
        floats = ir.VectorType(ir.FloatType(), LANES)
        reduce = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.FloatType(), [ir.FloatType(), floats]),
            f"llvm.vector.reduce.fadd.v{LANES}f32",
        )
        return builder.call(reduce, [ir.Constant(ir.FloatType(), -0.0), product], fastmath=["reassoc", "contract"])

    return signature, codegen


@intrinsic
def accumulate(typingctx: Any, data: Any, base: Any, sums: Any, start: Any) -> Any:
    """Add ``data[base + k]`` to ``sums[start + k]``, float32, for `LANES` elements; neither index is checked."""
    signature = types.void(data, types.intp, sums, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _vector(context, builder, signature.args[0], args[0], args[1])[0]
        total, pointer = _vector(context, builder, signature.args[2], args[2], args[3])
        builder.store(builder.fadd(total, x), pointer, align=4)
        return context.get_dummy_value()

    return signature, codegen

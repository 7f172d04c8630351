"""Correct bfloat16 for Triton's interpreter.

As shipped the interpreter keeps bfloat16 as raw 16-bit integers: casts from fp32 truncate, denormals become zero, and
arithmetic works on the bit patterns. `install` lets torch do every cast from and to bfloat16 (round to nearest, ties
to even), and makes arithmetic on bfloat16 raise, because a kernel is meant to go to fp32 first.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_UNARY = ("fneg", "fabs", "exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "floor", "ceil")
_BINARY = ("fadd", "fsub", "fmul", "fdiv", "frem", "precise_divf", "maximumf", "minimumf", "maxnumf", "minnumf")
_OTHER = ("fma", "dot", "clampf")


def encode(values: np.ndarray) -> np.ndarray:
    """fp32/fp64/integer values -> bfloat16 bit patterns, rounded once to nearest even."""
    dtype = torch.float64 if values.dtype.kind != "f" or values.dtype.itemsize == 8 else torch.float32
    source = torch.from_numpy(np.array(values, dtype=np.float64 if dtype == torch.float64 else np.float32))
    return source.to(torch.bfloat16).view(torch.uint16).numpy().reshape(values.shape)


def decode(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns -> fp32 values, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def install() -> None:
    """Patch the interpreter of the running process; a second call changes nothing."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bfloat16_is_right", False):
        return
    shipped = builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == after or tl.bfloat16 not in (before, after):
            return shipped(self, source, target)
        if after == tl.bfloat16:
            data = encode(source.data)
        else:
            data = decode(source.data).astype(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, after)

    builder.cast_impl = cast
    shipped_fp_to_fp = builder.create_fp_to_fp

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return shipped_fp_to_fp(self, source, target, rounding)

    builder.create_fp_to_fp = fp_to_fp
    compares = [name for name in dir(builder) if name.startswith("create_fcmp")]
    for name in [*(f"create_{op}" for op in (*_UNARY, *_BINARY, *_OTHER)), *compares]:
        if hasattr(builder, name):
            setattr(builder, name, _refusing(getattr(builder, name), name, tl.bfloat16))
    reductions = interpreter.ReduceScanOpInterface
    reductions.apply = _refusing(reductions.apply, "reduction", tl.bfloat16)
    builder.bfloat16_is_right = True


def _refusing(shipped: Callable[..., Any], name: str, bfloat16: Any) -> Callable[..., Any]:
    def checked(self: Any, *operands: Any) -> Any:
        flat = [o for operand in operands for o in (operand if isinstance(operand, tuple) else (operand,))]
        if any(getattr(getattr(o, "dtype", None), "scalar", None) == bfloat16 for o in flat):
            raise TypeError(f"{name} on bfloat16 in the interpreter: convert to float32 before arithmetic")
        return shipped(self, *operands)

    return checked

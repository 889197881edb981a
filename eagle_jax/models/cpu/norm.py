"""Root-mean-square norm in one call, where XLA makes five small operations of it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.models.cpu.emit import KINDS, Emit, instruction, words
from eagle_jax.models.cpu.ffi import JOB_OWN, compile_rows_handler, frame, register

_X, _WEIGHT, _EPS, _Y, _D = range(JOB_OWN, JOB_OWN + 5)


def rms_norm(x: Float[Array, "M D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "M D"]:
    """weight * (x / rms(x)), both factors in the dtype of x, for dtypes in `KINDS`; the norm itself in float32."""
    target = register("rms_norm", KINDS[x.dtype.name], _handler)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(target, result)(x, weight.astype(x.dtype), jnp.full((1,), eps, jnp.float32))


@functools.cache
def _handler(kind: str):
    """The FFI handler for one dtype."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    read = frame()
    arg, ret, data, dim = read.arg, read.ret, read.data, read.dim
    normalize = instruction(kind, Emit.normalize, 5)

    @inlined
    def describe(call, job):
        put(job, _X, data(arg(call, 0)))
        put(job, _WEIGHT, data(arg(call, 1)))
        put(job, _EPS, data(arg(call, 2)))
        put(job, _Y, data(ret(call, 0)))
        put(job, _D, dim(arg(call, 0), 1))
        return dim(arg(call, 0), 0), dim(arg(call, 0), 1)

    @inlined
    def row(job, i):
        d = word(job, _D)
        offset = i * d * width
        normalize(word(job, _X) + offset, word(job, _WEIGHT), word(job, _EPS), word(job, _Y) + offset, d)

    return compile_rows_handler(5, describe, row)

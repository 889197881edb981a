"""Root-mean-square norm in one call, where XLA makes five small operations of it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.models.cpu.emit import KINDS, Emit, instruction, words
from eagle_jax.models.cpu.ffi import (
    CHUNKS,
    HELPERS,
    JOB_OWN,
    JOB_SCRATCH,
    compile_handler,
    frame,
    memory,
    register,
)

_CHUNK_ELEMENTS = 64 * 1024  # taken by a thread at a time

_X, _WEIGHT, _EPS, _Y, _ROWS, _D, _STEP = range(JOB_OWN, JOB_OWN + 7)


def rms_norm(x: Float[Array, "M D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "M D"]:
    """weight * (x / rms(x)), both factors in the dtype of x, for dtypes in `KINDS`; the norm itself in float32."""
    target = register("rms_norm", KINDS[x.dtype.name], _handler)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(target, result)(x, weight.astype(x.dtype), jnp.full((1,), eps, jnp.float32))


@functools.cache
def _handler(kind: str):
    """The FFI handler: rows in chunks."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    malloc, _ = memory()
    read = frame()
    arg, ret, data, dim = read.arg, read.ret, read.data, read.dim
    normalize = instruction(kind, Emit.normalize, 5)

    @inlined
    def begin(call):
        rows, d = dim(arg(call, 0), 0), dim(arg(call, 0), 1)
        step = max(1, _CHUNK_ELEMENTS // max(d, 1))
        job = malloc(8 * (JOB_OWN + 7))
        put(job, _X, data(arg(call, 0)))
        put(job, _WEIGHT, data(arg(call, 1)))
        put(job, _EPS, data(arg(call, 2)))
        put(job, _Y, data(ret(call, 0)))
        put(job, _ROWS, rows)
        put(job, _D, d)
        put(job, _STEP, step)
        put(job, CHUNKS, (rows + step - 1) // step)
        put(job, HELPERS, (rows + step - 1) // step - 1)
        put(job, JOB_SCRATCH, 0)
        return job

    @inlined
    def run(job, chunk, scratch):
        d, step = word(job, _D), word(job, _STEP)
        for row in range(chunk * step, min(chunk * step + step, word(job, _ROWS))):
            offset = row * d * width
            normalize(word(job, _X) + offset, word(job, _WEIGHT), word(job, _EPS), word(job, _Y) + offset, d)

    return compile_handler(begin, run)

"""Rotary embeddings in one call, where XLA slices and joins halves of heads."""

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

_X, _COSINES, _SINES, _OUT, _TOKENS, _H, _D, _STEP = range(JOB_OWN, JOB_OWN + 8)


def rotate(
    x: Float[Array, "B T H d"], cosines: Float[Array, "B T h"], sines: Float[Array, "B T h"]
) -> Float[Array, "B T H d"]:
    """What `eagle_jax.models.rope.rotate` gives, for dtypes in `KINDS`."""
    target = register("rope", KINDS[x.dtype.name], _handler)
    angles = (cosines.astype(jnp.float32), sines.astype(jnp.float32))
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, *angles)


@functools.cache
def _handler(kind: str):
    """The FFI handler: tokens in chunks."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    malloc, _ = memory()
    read = frame()
    arg, ret, data, dim = read.arg, read.ret, read.data, read.dim
    rotate = instruction(kind, Emit.rotate, 5)

    @inlined
    def begin(call):
        x = arg(call, 0)
        tokens, heads, d = dim(x, 0) * dim(x, 1), dim(x, 2), dim(x, 3)
        step = max(1, _CHUNK_ELEMENTS // max(heads * d, 1))
        job = malloc(8 * (JOB_OWN + 8))
        put(job, _X, data(x))
        put(job, _COSINES, data(arg(call, 1)))
        put(job, _SINES, data(arg(call, 2)))
        put(job, _OUT, data(ret(call, 0)))
        put(job, _TOKENS, tokens)
        put(job, _H, heads)
        put(job, _D, d)
        put(job, _STEP, step)
        put(job, CHUNKS, (tokens + step - 1) // step)
        put(job, HELPERS, (tokens + step - 1) // step - 1)
        put(job, JOB_SCRATCH, 0)
        return job

    @inlined
    def run(job, chunk, scratch):
        heads, d, step = word(job, _H), word(job, _D), word(job, _STEP)
        half = d // 2
        for token in range(chunk * step, min(chunk * step + step, word(job, _TOKENS))):
            cosines = word(job, _COSINES) + token * half * 4
            sines = word(job, _SINES) + token * half * 4
            for head in range(heads):
                offset = (token * heads + head) * d * width
                rotate(word(job, _X) + offset, cosines, sines, word(job, _OUT) + offset, half)

    return compile_handler(begin, run)

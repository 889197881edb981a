"""Rotary embeddings in one call, where XLA slices and joins halves of heads."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.models.cpu.emit import KINDS, Emit, instruction, words
from eagle_jax.models.cpu.ffi import JOB_OWN, compile_rows_handler, frame, register

_X, _COSINES, _SINES, _OUT, _H, _D = range(JOB_OWN, JOB_OWN + 6)


def rotate(
    x: Float[Array, "B T H d"], cosines: Float[Array, "B T h"], sines: Float[Array, "B T h"]
) -> Float[Array, "B T H d"]:
    """What `eagle_jax.models.rope.rotate` gives, for dtypes in `KINDS`."""
    target = register("rope", KINDS[x.dtype.name], _handler)
    angles = (cosines.astype(jnp.float32), sines.astype(jnp.float32))
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, *angles)


@functools.cache
def _handler(kind: str):
    """The FFI handler for one dtype; a row is a token with all its heads."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    read = frame()
    arg, ret, data, dim = read.arg, read.ret, read.data, read.dim
    rotate = instruction(kind, Emit.rotate, 5)

    @inlined
    def describe(call, job):
        x = arg(call, 0)
        put(job, _X, data(x))
        put(job, _COSINES, data(arg(call, 1)))
        put(job, _SINES, data(arg(call, 2)))
        put(job, _OUT, data(ret(call, 0)))
        put(job, _H, dim(x, 2))
        put(job, _D, dim(x, 3))
        return dim(x, 0) * dim(x, 1), dim(x, 2) * dim(x, 3)

    @inlined
    def row(job, token):
        heads, d = word(job, _H), word(job, _D)
        half = d // 2
        cosines = word(job, _COSINES) + token * half * 4
        sines = word(job, _SINES) + token * half * 4
        for head in range(heads):
            offset = (token * heads + head) * d * width
            rotate(word(job, _X) + offset, cosines, sines, word(job, _OUT) + offset, half)

    return compile_rows_handler(6, describe, row)

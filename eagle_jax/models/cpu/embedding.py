"""Rows of a table of embeddings, where XLA would first make a float32 copy of a table of 16-bit floats."""

import functools

import jax
from jaxtyping import Array, Float, Int

from eagle_jax.models.cpu.emit import KINDS, Emit, instruction, words
from eagle_jax.models.cpu.ffi import JOB_OWN, compile_rows_handler, frame, int32, register

_TABLE, _TOKENS, _OUT, _V, _BYTES = range(JOB_OWN, JOB_OWN + 5)


def embedding(table: Float[Array, "V D"], tokens: Int[Array, " M"]) -> Float[Array, "M D"]:
    """table[tokens], ids outside the table taken as the nearest in it, for dtypes in `KINDS`."""
    target = register("embedding", KINDS[table.dtype.name], _handler)
    result = jax.ShapeDtypeStruct((tokens.shape[0], table.shape[1]), table.dtype)
    return jax.ffi.ffi_call(target, result)(table, tokens.astype("int32"))


@functools.cache
def _handler(kind: str):
    """The FFI handler for one dtype."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    read = frame()
    arg, ret, data, dim, number = read.arg, read.ret, read.data, read.dim, int32()
    copy = instruction(kind, Emit.copy, 3)

    @inlined
    def describe(call, job):
        put(job, _TABLE, data(arg(call, 0)))
        put(job, _TOKENS, data(arg(call, 1)))
        put(job, _OUT, data(ret(call, 0)))
        put(job, _V, dim(arg(call, 0), 0))
        put(job, _BYTES, dim(arg(call, 0), 1) * width)
        return dim(arg(call, 1), 0), dim(arg(call, 0), 1)

    @inlined
    def row(job, i):
        size = word(job, _BYTES)
        token = min(max(number(word(job, _TOKENS), i), 0), word(job, _V) - 1)
        copy(word(job, _OUT) + i * size, word(job, _TABLE) + token * size, size)

    return compile_rows_handler(5, describe, row)

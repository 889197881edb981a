"""Attention of a few tokens over a committed cache and uncommitted rows, in one call.

In XLA this is a dozen small operations over the cache's whole capacity; here it is one pass over the committed rows
only. The weighted sum of a token runs over the rows that it sees, in the order of their positions, whether they are
committed or not: a node of a draft tree gets, to the bit, what it would get in a step of its own.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.models.cpu.emit import KINDS, Emit, float32_lanes, instruction, words
from eagle_jax.models.cpu.ffi import (
    CHUNKS,
    HELPERS,
    JOB_OWN,
    JOB_SCRATCH,
    compile_handler,
    frame,
    int32,
    memory,
    register,
)
from eagle_jax.models.cpu.matmul import products

_HELPER_PRODUCTS = 40_000  # multiplications that are worth waking one more thread

_WORDS = 16  # of the job, after its head
(_Q, _KEYS, _VALUES, _CACHE_KEYS, _CACHE_VALUES, _LENGTHS, _MASK, _FIRST, _SCALE, _OUT) = range(
    JOB_OWN, JOB_OWN + 10
)
_T, _E, _K, _S, _G, _D = range(JOB_OWN + 10, JOB_OWN + _WORDS)


def attention(
    q: Float[Array, "B T H d"],
    keys: Float[Array, "B E K d"],
    values: Float[Array, "B E K d"],
    mask: Bool[Array, "B T E"],
    cache_keys: Float[Array, "B K S d"],
    cache_values: Float[Array, "B K S d"],
    lengths: Int[Array, " B"],
    first_visible: Int[Array, "B T"],
) -> Float[Array, "B T H d"]:
    """What `eagle_jax.models.attention.attend` gives, for dtypes in `KINDS`.

    Args:
        q: not scaled yet.
        mask: rows that each token sees, under a window too. At least one; their order is that of their positions.
        first_visible: the first committed row that each token sees; 0 without a window.
    """
    B, T, H, d = q.shape
    scale = jnp.full((1,), 1.0 / math.sqrt(d), jnp.float32)
    lengths, first_visible = lengths.astype(jnp.int32), first_visible.astype(jnp.int32)
    operands = (q, keys, values, cache_keys, cache_values, lengths, mask, first_visible, scale)
    target = register("attention", KINDS[q.dtype.name], _handler)
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((B, T, H, d), q.dtype))(*operands)


@functools.cache
def _handler(kind: str):
    """The FFI handler: a chunk is one token and one KV head with its group of query heads."""
    from numba import njit, types

    lanes = float32_lanes()
    inlined = functools.partial(njit, inline="always")
    width = 4 if kind == "f32" else 2
    word, put, _, _ = words()
    malloc, _ = memory()
    code, read = products(kind), frame()
    multiply, single, pack = code.multiply, code.single, code.pack
    arg, ret, data, dim, number = read.arg, read.ret, read.data, read.dim, int32()
    exponentials = instruction(kind, Emit.exponentials, 3)
    accumulate_8 = instruction(kind, lambda e, *operands: e.accumulate(8, *operands), 5)
    accumulate_4 = instruction(kind, lambda e, *operands: e.accumulate(4, *operands), 5)
    accumulate_2 = instruction(kind, lambda e, *operands: e.accumulate(2, *operands), 5)
    accumulate_one = instruction(kind, Emit.accumulate_one, 5)
    quotient = instruction(kind, Emit.quotient, 4)
    byte = instruction(
        "f32",
        lambda e, base, i: e.b.zext(e.load(e.at(base, (i, 1)), e.ir.IntType(8), 1), e.i64),
        2,
        types.int64,
    )
    put_float = instruction(
        "f32", lambda e, base, i, bits: e.store(e.b.trunc(bits, e.i32), e.at(base, (i, 4))), 3
    )
    NOTHING = 0xFF800000  # float32 minus infinity

    @njit(error_model="numpy")
    def accumulate(values, stride, weights, count, sums, d):
        column = 0
        while column + 8 * lanes <= d:
            accumulate_8(values + column * width, stride, weights, count, sums + column * 4)
            column += 8 * lanes
        while column + 4 * lanes <= d:
            accumulate_4(values + column * width, stride, weights, count, sums + column * 4)
            column += 4 * lanes
        while column + 2 * lanes <= d:
            accumulate_2(values + column * width, stride, weights, count, sums + column * 4)
            column += 2 * lanes
        while column < d:
            accumulate_one(values + column * width, stride, weights, count, sums + column * 4)
            column += 1

    @inlined
    def begin(call):
        B, T, d = dim(arg(call, 0), 0), dim(arg(call, 0), 1), dim(arg(call, 0), 3)
        E, K, S = dim(arg(call, 1), 1), dim(arg(call, 1), 2), dim(arg(call, 3), 2)
        G = dim(arg(call, 0), 2) // K
        job = malloc(8 * (JOB_OWN + _WORDS))
        for i in range(9):
            put(job, _Q + i, data(arg(call, i)))
        put(job, _OUT, data(ret(call, 0)))
        put(job, _T, T)
        put(job, _E, E)
        put(job, _K, K)
        put(job, _S, S)
        put(job, _G, G)
        put(job, _D, d)
        rows = 0
        for b in range(B):
            rows += number(data(arg(call, 5)), b) + E
        put(job, CHUNKS, B * K * T)
        put(job, HELPERS, min(B * K * T, rows * T * K * G * d * 2 // _HELPER_PRODUCTS) - 1)
        put(job, JOB_SCRATCH, 4 * G * (2 * d + S + E + 2 * lanes))
        return job

    @inlined
    def run(job, chunk, scratch):
        T, E, K, S, G, d = (
            word(job, _T),
            word(job, _E),
            word(job, _K),
            word(job, _S),
            word(job, _G),
            word(job, _D),
        )
        t, k, b = chunk % T, chunk // T % K, chunk // (T * K)
        start = max(number(word(job, _FIRST), b * T + t), 0)
        committed = max(number(word(job, _LENGTHS), b) - start, 0)
        visible = word(job, _MASK) + (b * T + t) * E
        new_stride = K * d * width
        new_keys = word(job, _KEYS) + (b * E * K + k) * d * width
        new_values = word(job, _VALUES) + (b * E * K + k) * d * width
        cache_row = ((b * K + k) * S + start) * d * width
        q = word(job, _Q) + ((b * T + t) * K + k) * G * d * width
        out = word(job, _OUT) + ((b * T + t) * K + k) * G * d * width

        # Per thread: the queries, the sums, and a line of scores for each query with room for its sum.
        line = S + E + 2 * lanes
        queries, sums, scores = scratch, scratch + G * d * 4, scratch + 2 * G * d * 4
        for g in range(G):
            pack(q + g * d * width, queries + g * d * 4, d)
            for i in range(d):
                put_float(sums, g * d + i, 0)

        multiply(word(job, _CACHE_KEYS) + cache_row, queries, scores, G, d, line, 0, committed, 1)
        count = committed
        for e in range(E):
            if byte(visible, e) != 0:
                for g in range(G):
                    single(
                        new_keys + e * new_stride,
                        queries + g * d * 4,
                        scores + (g * line + count) * 4,
                        d,
                        0,
                        1,
                    )
                count += 1
        filled = (count + lanes - 1) // lanes * lanes
        for g in range(G):
            weights = scores + g * line * 4
            for i in range(count, filled):
                put_float(weights, i, NOTHING)
            exponentials(weights, filled, word(job, _SCALE))
            accumulate(
                word(job, _CACHE_VALUES) + cache_row, d * width, weights, committed, sums + g * d * 4, d
            )
            count = committed
            for e in range(E):
                if byte(visible, e) != 0:
                    accumulate(new_values + e * new_stride, 0, weights + count * 4, 1, sums + g * d * 4, d)
                    count += 1
            quotient(sums + g * d * 4, weights + filled * 4, out + g * d * width, d)

    return compile_handler(begin, run)

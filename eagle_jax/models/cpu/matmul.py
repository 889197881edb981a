"""Products of a few rows with a large matrix, at the speed of memory.

XLA's CPU product repacks the weight when it sees 2 to 16 rows, so that verifying four draft tokens costs three times a
plain step. Here the weight is streamed once, in its own dtype.

A tile is one row of the weight times up to four rows of x: two vector accumulators for each product, stepping along the
contraction, summed by halves at the end, then the elements that do not fill a block, one by one. That is one fixed
order for each result, in a tile of any size.
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eagle_jax.models.cpu import MAX_ROWS, supported
from eagle_jax.models.cpu.emit import KINDS, Emit, instruction, words
from eagle_jax.models.cpu.ffi import (
    CHUNKS,
    DTYPE_F32,
    FRAME_ARGS_SIZE,
    HELPERS,
    JOB_OWN,
    JOB_SCRATCH,
    compile_handler,
    frame,
    memory,
    register,
)

_BLOCK = 12  # rows of the weight kept in cache while the tiles of x pass
_CHUNK_BYTES = 64 * 1024  # of weight, taken by a thread at a time
_HELPER_BYTES = 128 * 1024  # of weight (times tiles of x) that are worth waking one more thread

# Words of the job: the rows, then six words for each weight.
_X, _M, _K, _Y_F32, _WEIGHTS = range(JOB_OWN, JOB_OWN + 5)
_WEIGHT_WORDS = 6
_W, _Y, _OUT, _CHUNK_ROWS, _FIRST, _COUNT = range(_WEIGHT_WORDS)


def matmul(
    x: Float[Array, "M I"], weight: Float[Array, "O I"], preferred_element_type: jnp.dtype | None = None
) -> Float[Array, "M O"]:
    """`x @ weight.T`, accumulated in float32; for what is promised of the bits see `matmul_many`."""
    return matmul_many(x, [weight], preferred_element_type)[0]


def matmul_many(
    x: Float[Array, "M I"],
    weights: Sequence[Float[Array, "O I"]],
    preferred_element_type: jnp.dtype | None = None,
) -> list[Float[Array, "M O"]]:
    """`[x @ w.T for w in weights]` in one call: for query, key and value, or gate and up.

    With the kernel, row m of a result depends on row m of x and on the weight only, to the bit: not on M, the
    other rows, the other weights or the number of threads.

    Args:
        x: the rows, in the dtype of the weights.
        weights: float32, bfloat16 or float16, as checkpoints store them, [out, in]; all of one dtype.
        preferred_element_type: dtype of the results, that of x (default) or float32.

    Returns:
        one array [M, out] for each weight.

    Raises:
        ValueError: if shapes do not fit or dtypes differ.
    """
    if x.ndim != 2 or any(w.ndim != 2 or w.shape[1] != x.shape[1] for w in weights):
        shapes = ", ".join(str(w.shape) for w in weights)
        raise ValueError(
            f"expected x [M, in] and weights [out, in] with one `in`, got x {x.shape} and weights {shapes}"
        )
    if any(w.dtype != x.dtype for w in weights):
        raise ValueError(
            f"expected weights in the dtype of x, {x.dtype}, got {', '.join(str(w.dtype) for w in weights)}"
        )
    dtype = jnp.dtype(preferred_element_type or x.dtype)
    kind = KINDS.get(x.dtype.name)
    fits = dtype in (x.dtype, jnp.float32) and 1 <= x.shape[0] <= MAX_ROWS and x.shape[1] > 0
    if kind is None or not (weights and fits and supported()):
        return [_xla_matmul(x, w, dtype) for w in weights]
    target = register("matmul", kind, _handler)
    results = [jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), dtype) for w in weights]
    # Rows of 16 bits are widened once a call, into a result that nobody reads.
    scratch = jax.ShapeDtypeStruct((1,) if kind == "f32" else x.shape, jnp.float32)
    *products, _ = jax.ffi.ffi_call(target, [*results, scratch])(x, *weights)
    return products


def _xla_matmul(x: Float[Array, "M I"], weight: Float[Array, "O I"], dtype: jnp.dtype) -> Float[Array, "M O"]:
    """What runs without the kernel. The weight stands first: XLA on CPU prefers that."""
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype).T


@functools.cache
def products(kind: str) -> SimpleNamespace:
    """Compiled code for one stored dtype: `multiply` (rows of a weight with rows of x), `single`, `pack`."""
    from numba import njit

    width = 4 if kind == "f32" else 2

    def tile(columns):
        return instruction(kind, lambda e, *operands: e.tile(columns, *operands), 6)

    tile_1, tile_2, tile_3, tile_4 = map(tile, (1, 2, 3, 4))

    @njit(error_model="numpy")
    def multiply(w, x, y, m_total, k, out, low, high, y_f32):
        """Rows [low, high) of the weight with all rows of x, these in tiles of nearly equal height."""
        y_width = 4 if y_f32 else width
        tiles = (m_total + 3) // 4
        for block in range(low, high, _BLOCK):
            end = min(block + _BLOCK, high)
            m = 0
            for t in range(tiles):
                columns = m_total // tiles + (1 if t < m_total % tiles else 0)
                x_m, y_m = x + m * k * 4, y + m * out * y_width
                for o in range(block, end):
                    w_o, y_o = w + o * k * width, y_m + o * y_width
                    if columns == 4:
                        tile_4(w_o, x_m, y_o, k, out, y_f32)
                    elif columns == 3:
                        tile_3(w_o, x_m, y_o, k, out, y_f32)
                    elif columns == 2:
                        tile_2(w_o, x_m, y_o, k, out, y_f32)
                    else:
                        tile_1(w_o, x_m, y_o, k, out, y_f32)
                m += columns

    return SimpleNamespace(multiply=multiply, single=tile_1, pack=instruction(kind, Emit.pack, 3))


@functools.cache
def _handler(kind: str):
    """The FFI handler for weights of one dtype: rows of the weights in chunks."""
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    width, packed = 4 if kind == "f32" else 2, kind != "f32"
    word, put, _, _ = words()
    malloc, _ = memory()
    code, read = products(kind), frame()
    multiply, pack = code.multiply, code.pack
    arg, ret, data, dim, dtype = read.arg, read.ret, read.data, read.dim, read.dtype

    @inlined
    def begin(call):
        weights = word(call, FRAME_ARGS_SIZE) - 1
        x = data(arg(call, 0))
        m, k = dim(arg(call, 0), 0), dim(arg(call, 0), 1)
        if packed:
            scratch = data(ret(call, weights))
            for i in range(m):
                pack(x + i * k * width, scratch + i * k * 4, k)
            x = scratch

        job = malloc(8 * (_WEIGHTS + weights * _WEIGHT_WORDS))
        chunks, elements = 0, 0
        rows = max(1, _CHUNK_BYTES // (_BLOCK * k * width)) * _BLOCK
        for i in range(weights):
            weight = job + 8 * (_WEIGHTS + i * _WEIGHT_WORDS)
            out = dim(arg(call, 1 + i), 0)
            count = (out + rows - 1) // rows
            put(weight, _W, data(arg(call, 1 + i)))
            put(weight, _Y, data(ret(call, i)))
            put(weight, _OUT, out)
            put(weight, _CHUNK_ROWS, rows)
            put(weight, _FIRST, chunks)
            put(weight, _COUNT, count)
            chunks += count
            elements += out * k
        put(job, _X, x)
        put(job, _M, m)
        put(job, _K, k)
        put(job, _Y_F32, 1 if dtype(ret(call, 0)) == DTYPE_F32 else 0)
        put(job, CHUNKS, chunks)
        put(job, HELPERS, min(chunks, elements * width * ((m + 3) // 4) // _HELPER_BYTES) - 1)
        put(job, JOB_SCRATCH, 0)
        return job

    @inlined
    def run(job, chunk, scratch):
        weight = job + _WEIGHTS * 8
        while chunk >= word(weight, _FIRST) + word(weight, _COUNT):
            weight += _WEIGHT_WORDS * 8
        out, rows = word(weight, _OUT), word(weight, _CHUNK_ROWS)
        low = (chunk - word(weight, _FIRST)) * rows
        m, k, y_f32 = word(job, _M), word(job, _K), word(job, _Y_F32)
        multiply(
            word(weight, _W), word(job, _X), word(weight, _Y), m, k, out, low, min(low + rows, out), y_f32
        )

    return compile_handler(begin, run)

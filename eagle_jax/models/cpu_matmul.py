"""Products of a few rows with a large matrix on CPUs, at the speed of memory.

XLA's CPU product repacks the weight when it sees 2 to 16 rows, so that verifying four draft tokens costs
three times a plain step. Here the weight is streamed once, in its own dtype, and the bits of row m are the
same whether it comes alone or with 63 others, whichever threads run: a verification step gives exactly what
one-row steps give.

The kernel is compiled at first use by numba (the optional extra `cpu`) and called through XLA's FFI, on
XLA's own thread pool. Without numba, on other platforms, for other dtypes and for more than `MAX_ROWS` rows
the product is XLA's, which promises no such invariance.

This module knows nothing of models. It is not differentiable and cannot be vmapped; under a mesh, call it
inside `jax.shard_map`.

How it works. A tile is R rows of the weight times C rows of x: a vector accumulator for each of the R x C
results, stepping along the contraction, summed by halves at the end, then the elements that do not fill a
vector, one by one. That is one fixed order for each result; tiles differ in R and C only. Rows of the
weight go in chunks to whichever thread asks next.
"""

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MAX_ROWS = 64
"""More rows than this are left to XLA, whose packing pays by then."""

_KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BLOCK = 12  # rows of the weight kept in cache while the tiles of x pass: a multiple of every R
_CHUNK_BYTES = 64 * 1024  # of weight, taken by a thread at a time
_HELPER_BYTES = 128 * 1024  # of weight (times tiles of x) that are worth waking one more thread
_SPINS = 4000  # looks at the counter before the core is offered to others

# XLA's FFI (xla/ffi/api/c_api.h in jaxlib): two enum values, the version that this is written against (minor
# versions only append), and where fields lie. Structs are read as 8-byte words; numbers are offsets in words.
_DTYPE_F32 = 11
_EXTENSION_METADATA = 1
_API_MAJOR, _API_MINOR = 0, 3
_FRAME_EXTENSION, _FRAME_API, _FRAME_CTX = 1, 2, 3
_FRAME_ARGS_SIZE, _FRAME_ARGS, _FRAME_RETS = 7, 9, 14
_BUFFER_DTYPE, _BUFFER_DATA, _BUFFER_DIMS = 2, 3, 5
_API_ERROR_DESTROY, _API_SCHEDULE, _API_NUM_THREADS = 8, 17, 18

# The job shared by the threads of one call, in words: counters, what to do, then six words for each weight.
_NEXT, _DONE, _USERS = 0, 8, 9  # next chunk to take, chunks finished, threads that may still look at the job
_CALL = 10  # six words: argument struct of calls into XLA
_CHUNKS, _X, _M, _K, _Y_F32 = 16, 17, 18, 19, 20
_WEIGHTS, _WEIGHT_WORDS = 24, 6
_W, _Y, _OUT, _CHUNK_ROWS, _FIRST, _COUNT = range(6)


def supported() -> bool:
    """Whether `matmul` runs the kernel here: a CPU backend, POSIX, and numba installed.

    EAGLE_JAX_CPU_KERNEL=0 in the environment says no for the process (looked at when a function is traced).
    """
    return (
        os.environ.get("EAGLE_JAX_CPU_KERNEL", "1") != "0"
        and os.name == "posix"
        and importlib.util.find_spec("numba") is not None
        and jax.default_backend() == "cpu"
        and _vector_registers() is not None
    )


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
    kind = _KINDS.get(x.dtype.name)
    fits = dtype in (x.dtype, jnp.float32) and 1 <= x.shape[0] <= MAX_ROWS and x.shape[1] > 0
    if kind is None or not (weights and fits and supported()):
        return [_xla_matmul(x, w, dtype) for w in weights]
    target = _register(kind)
    results = [jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), dtype) for w in weights]
    # Rows of 16 bits are widened once a call, into a result that nobody reads.
    scratch = jax.ShapeDtypeStruct((1,) if kind == "f32" else x.shape, jnp.float32)
    *products, _ = jax.ffi.ffi_call(target, [*results, scratch])(x, *weights)
    return products


def _xla_matmul(x: Float[Array, "M I"], weight: Float[Array, "O I"], dtype: jnp.dtype) -> Float[Array, "M O"]:
    """What runs without the kernel. The weight stands first: XLA on CPU prefers that."""
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=dtype).T


_lock = threading.Lock()


def _register(kind: str) -> str:
    """Compile the handler for one dtype of weight, once a process, and tell XLA its name."""
    with _lock:  # two threads may trace at once
        return _register_once(kind)


@functools.cache
def _register_once(kind: str) -> str:
    name = f"eagle_jax_cpu_matmul_{kind}"
    handler, _ = _compile_handler(kind)
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler.address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu", api_version=1)
    return name


class _Emit:
    """LLVM instructions for one dtype of weight, at one place in a function. Addresses are integers."""

    def __init__(self, builder, kind: str, lanes: int):
        from llvmlite import ir

        self.ir, self.b, self.kind, self.lanes = ir, builder, kind, lanes
        self.i16, self.i32, self.i64, self.f32 = (
            ir.IntType(16),
            ir.IntType(32),
            ir.IntType(64),
            ir.FloatType(),
        )
        self.width = 4 if kind == "f32" else 2  # bytes in one element of the weight
        self.parts = 2 if kind == "bf16" else 1  # vectors of float32 in one vector of the weight
        self.block = self.parts * lanes  # elements in one step of the main loop

    def vector(self, element, lanes=None):
        return self.ir.VectorType(element, lanes or self.lanes)

    def at(self, address, *terms):
        """Address plus terms; a term (a, b) is a product."""
        for a, b in terms:
            a, b = (t if isinstance(t, self.ir.Value) else self.i64(t) for t in (a, b))
            address = self.b.add(address, self.b.mul(a, b))
        return address

    def load(self, address, type_, align=4):
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def store(self, value, address, align=4):
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def call(self, name, result, *arguments):
        from numba.core import cgutils

        signature = self.ir.FunctionType(result, [a.type for a in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), arguments)

    def fma(self, a, b, c):
        suffix = "f32" if a.type == self.f32 else f"v{self.lanes}f32"
        return self.call(f"llvm.fmuladd.{suffix}", a.type, a, b, c)

    def prefetch(self, address):
        pointer = self.b.inttoptr(address, self.ir.IntType(8).as_pointer())
        self.call("llvm.prefetch.p0", self.ir.VoidType(), pointer, self.i32(0), self.i32(3), self.i32(1))

    def opaque(self, value):
        """The same integer, of which the compiler knows nothing."""
        signature = self.ir.FunctionType(value.type, [value.type])
        return self.b.asm(signature, "", "=r,0", [value], side_effect=False)

    def widened(self, address, part=0):
        """One part of the next block of elements, as a float32 vector.

        A word of two bfloat16 is two float32 after one instruction each, so the two parts of a block of these
        are its even and its odd elements; `pack` puts x in that order too.
        """
        if self.kind == "bf16":
            words = self.load(address, self.vector(self.i32), align=2)
            constant = self.ir.Constant(words.type, [(16, 0xFFFF0000)[part]] * self.lanes)
            return self.b.bitcast((self.b.shl, self.b.and_)[part](words, constant), self.vector(self.f32))
        if self.kind == "f16":
            halves = self.load(address, self.vector(self.ir.HalfType()), align=2)
            return self.b.fpext(halves, self.vector(self.f32))
        return self.load(address, self.vector(self.f32))

    def widened_one(self, address):
        if self.kind == "bf16":
            bits = self.b.zext(self.load(address, self.i16, align=2), self.i32)
            return self.b.bitcast(self.b.shl(bits, self.i32(16)), self.f32)
        if self.kind == "f16":
            return self.b.fpext(self.load(address, self.ir.HalfType(), align=2), self.f32)
        return self.load(address, self.f32)

    def narrowed(self, value):
        """One float32 as the dtype of the weight, rounded to nearest even."""
        if self.kind == "f32":
            return value
        if self.kind == "f16":
            return self.b.fptrunc(value, self.ir.HalfType())
        bits = self.b.bitcast(value, self.i32)
        even = self.b.and_(self.b.lshr(bits, self.i32(16)), self.i32(1))
        rounded = self.b.add(self.b.add(bits, self.i32(0x7FFF)), even)
        nan = self.b.or_(bits, self.i32(0x400000))  # rounding could carry a NaN over into infinity
        rounded = self.b.select(self.b.fcmp_unordered("uno", value, value), nan, rounded)
        return self.b.trunc(self.b.lshr(rounded, self.i32(16)), self.i16)

    def sum(self, vector):
        """Sum of the lanes, the upper half onto the lower until one is left."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            undefined = self.ir.Constant(vector.type, self.ir.Undefined)
            low, high = (
                self.b.shuffle_vector(
                    vector, undefined, self.ir.Constant(self.vector(self.i32, lanes), list(picks))
                )
                for picks in (range(lanes), range(lanes, 2 * lanes))
            )
            vector = self.b.fadd(low, high)
        return self.b.extract_element(vector, self.i32(0))

    def tile(self, rows, columns, w, x, y, k, y_stride, y_f32):
        """y[c, r] = x[c] . w[r] for `rows` rows of the weight and `columns` of widened x, of length k."""
        from numba.core import cgutils

        zero, f32s = self.ir.Constant(self.vector(self.f32), None), self.vector(self.f32)
        products = [(r, c) for r in range(rows) for c in range(columns)]
        sums = {p: cgutils.alloca_once_value(self.b, zero) for p in products}
        for slot in sums.values():  # the slots are made once, at the entry; this tile may be in a loop
            self.b.store(zero, slot)
        ws = [self.at(w, (k, r * self.width)) for r in range(rows)]
        xs = [self.at(x, (k, c * 4)) for c in range(columns)]
        whole = self.b.and_(k, self.i64(-self.block))

        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            for r in range(rows):  # the same place in the next tile
                for line in range(0, self.block * self.width, 64):
                    self.prefetch(self.at(ws[r], (i, self.width), (k, rows * self.width), (line, 1)))
            for part in range(self.parts):
                # Registers hold the sums and the fewer of the two kinds of operand; the others pass through
                # one more. Words of the weight are read again for their second part: kept, they would push
                # sums out to the stack.
                w_i = self.opaque(i) if part else i
                x_at = [self.at(row, (i, 4), (4 * self.lanes, part)) for row in xs]
                w_at = [self.at(row, (w_i, self.width)) for row in ws]

                def step(r, c, w_vector, x_vector):
                    slot = sums[r, c]
                    self.b.store(self.fma(w_vector, x_vector, self.b.load(slot)), slot)

                if rows < columns:
                    held = [self.widened(place, part) for place in w_at]
                    for c in range(columns):
                        passing = self.load(x_at[c], f32s)
                        for r in range(rows):
                            step(r, c, held[r], passing)
                else:
                    held = [self.load(place, f32s) for place in x_at]
                    for r in range(rows):
                        passing = self.widened(w_at[r], part)
                        for c in range(columns):
                            step(r, c, passing, held[c])

        totals = {p: cgutils.alloca_once(self.b, self.f32) for p in products}
        for p in products:
            self.b.store(self.sum(self.b.load(sums[p])), totals[p])
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            x_ones = [self.load(self.at(row, (i, 4)), self.f32) for row in xs]
            for r in range(rows):
                w_one = self.widened_one(self.at(ws[r], (i, self.width)))
                for c in range(columns):
                    self.b.store(self.fma(w_one, x_ones[c], self.b.load(totals[r, c])), totals[r, c])

        with self.b.if_else(self.b.icmp_signed("!=", y_f32, self.i64(0))) as (wide, narrow):
            with wide:
                for r, c in products:
                    self.store(self.b.load(totals[r, c]), self.at(y, (y_stride, c * 4), (r, 4)))
            with narrow:
                for r, c in products:
                    value = self.narrowed(self.b.load(totals[r, c]))
                    self.store(value, self.at(y, (y_stride, c * self.width), (r, self.width)), self.width)

    def pack(self, x, to, k):
        """Widen k elements of x, in the order of `widened`."""
        from numba.core import cgutils

        whole = self.b.and_(k, self.i64(-self.block))
        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            for part in range(self.parts):
                vector = self.widened(self.at(x, (i, self.width)), part)
                self.store(vector, self.at(to, (i, 4), (part, 4 * self.lanes)))
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            self.store(self.widened_one(self.at(x, (i, self.width))), self.at(to, (i, 4)))

    def atomic_add(self, base, i, value):
        pointer = self.b.inttoptr(self.at(base, (i, 8)), self.i64.as_pointer())
        return self.b.atomic_rmw("add", pointer, value, "seq_cst")

    def atomic_load(self, base, i):
        pointer = self.b.inttoptr(self.at(base, (i, 8)), self.i64.as_pointer())
        return self.b.load_atomic(pointer, "acquire", 8)

    def enter(self, function, argument):
        """Call a C function of one pointer that returns a pointer."""
        signature = self.ir.FunctionType(self.i64, [self.i64])
        return self.b.call(self.b.inttoptr(function, signature.as_pointer()), [argument])


@functools.cache
def _vector_registers() -> tuple[int, int] | None:
    """(float32 lanes, number) of the host's vector registers; None for a host too old for the kernel."""
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith(("x86_64", "i686")):
        return 4, 32  # NEON and its like
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 32
    return (8, 16) if all(features.get(f) for f in ("avx2", "fma", "f16c")) else None


@functools.cache
def _compile_handler(kind: str):
    """The FFI handler for weights of one dtype: reads the call frame, shares the work, waits for it.

    Returns it with the function that it has helpers run. Code lives as long as these two do, hence the cache.
    """
    from numba import cfunc, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    host = _vector_registers()
    if host is None:
        raise RuntimeError("the CPU kernel needs AVX2, FMA and F16C; ask `supported()` first")
    lanes, registers = host
    # Rows of the weight in a tile with 1, 2, 3 and 4 rows of x: as many sums as the registers hold.
    r1, r2, r3, r4 = (6, 6, 6, 6) if registers == 32 else (6, 6, 4, 3)
    width = 4 if kind == "f32" else 2
    packed = kind != "f32"
    int64 = types.int64
    inlined = functools.partial(njit, inline="always")

    libc = ctypes.CDLL(None)
    malloc, free, sched_yield = libc.malloc, libc.free, libc.sched_yield
    malloc.argtypes, malloc.restype = [ctypes.c_int64], ctypes.c_int64
    free.argtypes, free.restype = [ctypes.c_int64], None
    sched_yield.argtypes, sched_yield.restype = [], ctypes.c_int

    def instruction(emit, arguments: int, result=types.void):
        """A function for compiled code, made from one that emits instructions for LLVM integers."""

        @intrinsic
        def function(typing_context, *operands):
            def codegen(context, builder, signature, values):
                value = emit(_Emit(builder, kind, lanes), *cgutils.unpack_tuple(builder, values[0]))
                return context.get_dummy_value() if result is types.void else value

            return result(types.StarArgTuple.from_types([int64] * arguments)), codegen

        return function

    def tile(rows, columns):
        return instruction(lambda e, *operands: e.tile(rows, columns, *operands), 6)

    tile_1, tile_2, tile_3, tile_4, single = tile(r1, 1), tile(r2, 2), tile(r3, 3), tile(r4, 4), tile(1, 1)
    pack = instruction(_Emit.pack, 3)
    word = instruction(lambda e, base, i: e.load(e.at(base, (i, 8)), e.i64, 8), 2, int64)
    put = instruction(lambda e, base, i, value: e.store(value, e.at(base, (i, 8)), 8), 3)
    add = instruction(_Emit.atomic_add, 3, int64)
    peek = instruction(_Emit.atomic_load, 2, int64)
    enter = instruction(_Emit.enter, 2, int64)

    @inlined
    def multiply(w, x, y, m_total, k, out, low, high, y_f32):
        """Rows [low, high) of the weight with all rows of x, these in tiles of nearly equal height."""
        y_width = 4 if y_f32 else width
        tiles = (m_total + 3) // 4
        for block in range(low, high, _BLOCK):
            end = min(block + _BLOCK, high)
            m = 0
            for t in range(tiles):
                columns = m_total // tiles + (1 if t < m_total % tiles else 0)
                x_m, y_m, o = x + m * k * 4, y + m * out * y_width, block
                if columns == 4:
                    while o + r4 <= end:
                        tile_4(w + o * k * width, x_m, y_m + o * y_width, k, out, y_f32)
                        o += r4
                elif columns == 3:
                    while o + r3 <= end:
                        tile_3(w + o * k * width, x_m, y_m + o * y_width, k, out, y_f32)
                        o += r3
                elif columns == 2:
                    while o + r2 <= end:
                        tile_2(w + o * k * width, x_m, y_m + o * y_width, k, out, y_f32)
                        o += r2
                else:
                    while o + r1 <= end:
                        tile_1(w + o * k * width, x_m, y_m + o * y_width, k, out, y_f32)
                        o += r1
                while o < end:
                    for c in range(columns):
                        single(
                            w + o * k * width, x_m + c * k * 4, y_m + (c * out + o) * y_width, k, out, y_f32
                        )
                    o += 1
                m += columns

    @inlined
    def leave(job):
        if add(job, _USERS, -1) == 1:
            free(job)

    @cfunc(int64(int64), error_model="numpy")
    def help_out(job):
        """Take chunks until none is left."""
        chunk = add(job, _NEXT, 1)
        while chunk < word(job, _CHUNKS):
            weight = job + _WEIGHTS * 8
            while chunk >= word(weight, _FIRST) + word(weight, _COUNT):
                weight += _WEIGHT_WORDS * 8
            out, rows = word(weight, _OUT), word(weight, _CHUNK_ROWS)
            low = (chunk - word(weight, _FIRST)) * rows
            m, k, y_f32 = word(job, _M), word(job, _K), word(job, _Y_F32)
            multiply(
                word(weight, _W), word(job, _X), word(weight, _Y), m, k, out, low, min(low + rows, out), y_f32
            )
            add(job, _DONE, 1)
            chunk = add(job, _NEXT, 1)
        leave(job)
        return 0

    help_out_address = help_out.address

    @inlined
    def destroy_error(api, call, error):
        put(call, 0, 24)
        put(call, 1, 0)
        put(call, 2, error)
        enter(word(api, _API_ERROR_DESTROY), call)

    @inlined
    def pool_size(api, ctx, call):
        """Threads of XLA's pool, 1 if it has none."""
        put(call, 0, 32)
        put(call, 1, 0)
        put(call, 2, ctx)
        put(call, 3, call + 32)
        error = enter(word(api, _API_NUM_THREADS), call)
        if error != 0:
            destroy_error(api, call, error)
            return 1
        return word(call, 4)

    @inlined
    def schedule(api, ctx, call, job):
        """Have `help_out(job)` called some time, by some thread of the pool."""
        put(call, 0, 40)
        put(call, 1, 0)
        put(call, 2, ctx)
        put(call, 3, help_out_address)
        put(call, 4, job)
        error = enter(word(api, _API_SCHEDULE), call)
        if error != 0:
            destroy_error(api, call, error)
        return error == 0

    @cfunc(int64(int64), error_model="numpy")
    def handler(frame):
        extension = word(frame, _FRAME_EXTENSION)
        if extension != 0 and (word(extension, 1) & 0xFFFFFFFF) == _EXTENSION_METADATA:
            metadata = word(extension, 3)
            put(metadata, 3, _API_MAJOR | _API_MINOR << 32)
            put(metadata, 4, 0)  # no traits
            return 0

        args, rets, weights = (
            word(frame, _FRAME_ARGS),
            word(frame, _FRAME_RETS),
            word(frame, _FRAME_ARGS_SIZE) - 1,
        )
        x_dims, x = word(word(args, 0), _BUFFER_DIMS), word(word(args, 0), _BUFFER_DATA)
        m, k = word(x_dims, 0), word(x_dims, 1)
        if packed:
            scratch = word(word(rets, weights), _BUFFER_DATA)
            for i in range(m):
                pack(x + i * k * width, scratch + i * k * 4, k)
            x = scratch

        # On the heap and counted, since a helper may start after the work is done and this call has returned.
        job = malloc(8 * (_WEIGHTS + weights * _WEIGHT_WORDS))
        chunks, elements = 0, 0
        rows = max(1, _CHUNK_BYTES // (_BLOCK * k * width)) * _BLOCK
        for i in range(weights):
            weight, buffer, result = (
                job + 8 * (_WEIGHTS + i * _WEIGHT_WORDS),
                word(args, 1 + i),
                word(rets, i),
            )
            out = word(word(buffer, _BUFFER_DIMS), 0)
            count = (out + rows - 1) // rows
            put(weight, _W, word(buffer, _BUFFER_DATA))
            put(weight, _Y, word(result, _BUFFER_DATA))
            put(weight, _OUT, out)
            put(weight, _CHUNK_ROWS, rows)
            put(weight, _FIRST, chunks)
            put(weight, _COUNT, count)
            chunks += count
            elements += out * k
        put(job, _NEXT, 0)
        put(job, _DONE, 0)
        put(job, _CHUNKS, chunks)
        put(job, _X, x)
        put(job, _M, m)
        put(job, _K, k)
        put(job, _Y_F32, 1 if (word(word(rets, 0), _BUFFER_DTYPE) & 0xFFFFFFFF) == _DTYPE_F32 else 0)

        helpers = min(chunks, elements * width * ((m + 3) // 4) // _HELPER_BYTES) - 1
        api, ctx, call = word(frame, _FRAME_API), word(frame, _FRAME_CTX), job + 8 * _CALL
        if helpers > 0:
            helpers = min(helpers, pool_size(api, ctx, call) - 1)
        put(job, _USERS, 2 + max(helpers, 0))  # this call waits, and helps too
        for _ in range(helpers):
            if not schedule(api, ctx, call, job):
                add(job, _USERS, -1)
        enter(help_out_address, job)
        # Wait for chunks that helpers have begun, never for helpers that have not: the pool may have no
        # thread to spare.
        spins = 0
        while peek(job, _DONE) < chunks:
            spins += 1
            if spins > _SPINS:
                sched_yield()
        leave(job)
        return 0

    return handler, help_out

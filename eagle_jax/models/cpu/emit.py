"""LLVM instructions of the CPU kernels, for the dtypes that weights and caches are kept in.

A vector of the stored dtype becomes one or two vectors of float32; sums are float32 throughout. Every element of a
result goes through one fixed order of operations, whatever is computed beside it.
"""

import functools
from collections.abc import Callable

from eagle_jax.models.cpu import vector_lanes

_LINE = 64  # bytes that memory delivers at a time
_AHEAD = 1024  # bytes between what is read and what is asked for
KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Emit:
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
        self.block = 2 * lanes  # elements in one step of the main loop: two vectors of float32

    def vector(self, element, lanes=None):
        """The type of a vector."""
        return self.ir.VectorType(element, lanes or self.lanes)

    def at(self, address, *terms):
        """Address plus terms; a term (a, b) is a product."""
        for a, b in terms:
            a, b = (t if isinstance(t, self.ir.Value) else self.i64(t) for t in (a, b))
            address = self.b.add(address, self.b.mul(a, b))
        return address

    def load(self, address, type_, align=4):
        """What lies at an address."""
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def store(self, value, address, align=4):
        """Puts a value at an address."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def call(self, name, result, *arguments):
        """Calls a function of LLVM by name."""
        from numba.core import cgutils

        signature = self.ir.FunctionType(result, [a.type for a in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), arguments)

    def fma(self, a, b, c):
        """a * b + c, rounded once, of floats or vectors."""
        suffix = "f32" if a.type == self.f32 else f"v{self.lanes}f32"
        return self.call(f"llvm.fmuladd.{suffix}", a.type, a, b, c)

    def prefetch(self, address):
        """Asks for a line of memory, which need not exist."""
        pointer = self.b.inttoptr(address, self.ir.IntType(8).as_pointer())
        self.call("llvm.prefetch.p0", self.ir.VoidType(), pointer, self.i32(0), self.i32(3), self.i32(1))

    def widened(self, address, part):
        """One half of the next block of elements, as a float32 vector.

        A word of two bfloat16 is two float32 after one instruction each, so the two parts of a block of these
        are its even and its odd elements; `pack` puts x in that order too.
        """
        if self.kind == "bf16":
            words = self.load(address, self.vector(self.i32), align=2)
            constant = self.ir.Constant(words.type, [(16, 0xFFFF0000)[part]] * self.lanes)
            return self.b.bitcast((self.b.shl, self.b.and_)[part](words, constant), self.vector(self.f32))
        address = self.at(address, (part, self.lanes * self.width))
        if self.kind == "f16":
            halves = self.load(address, self.vector(self.ir.HalfType()), align=2)
            return self.b.fpext(halves, self.vector(self.f32))
        return self.load(address, self.vector(self.f32))

    def widened_one(self, address):
        """One element as float32."""
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
        return self.b.trunc(self.b.lshr(self.rounded(value), self.i32(16)), self.i16)

    def rounded(self, value):
        """Bits of float32 (one or a vector) of which the upper halves are the nearest bfloat16."""
        lanes = getattr(value.type, "count", None)

        def constant(number):
            return (
                self.ir.Constant(self.vector(self.i32, lanes), [number] * lanes)
                if lanes
                else self.i32(number)
            )

        bits = self.b.bitcast(value, self.vector(self.i32, lanes) if lanes else self.i32)
        even = self.b.and_(self.b.lshr(bits, constant(16)), constant(1))
        rounded = self.b.add(self.b.add(bits, constant(0x7FFF)), even)
        nan = self.b.or_(bits, constant(0x400000))  # rounding could carry a NaN over into infinity
        return self.b.select(self.b.fcmp_unordered("uno", value, value), nan, rounded)

    def store_block(self, parts, address):
        """Store two vectors of float32 as the block that `widened` reads them from."""
        if self.kind == "bf16":
            even, odd = map(self.rounded, parts)
            even = self.b.lshr(even, self.ir.Constant(even.type, [16] * self.lanes))
            odd = self.b.and_(odd, self.ir.Constant(odd.type, [0xFFFF0000] * self.lanes))
            self.store(self.b.or_(even, odd), address, self.width)
            return
        for part, value in enumerate(parts):
            if self.kind == "f16":
                value = self.b.fptrunc(value, self.vector(self.ir.HalfType()))
            self.store(value, self.at(address, (part, self.lanes * self.width)), self.width)

    def broadcast(self, value):
        """A vector of one float32."""
        undefined = self.ir.Constant(self.vector(self.f32), self.ir.Undefined)
        single = self.b.insert_element(undefined, value, self.i32(0))
        zeros = self.ir.Constant(self.vector(self.i32), [0] * self.lanes)
        return self.b.shuffle_vector(single, undefined, zeros)

    def halves(self, vector, lanes):
        """The lower and the upper `lanes` elements."""
        undefined = self.ir.Constant(vector.type, self.ir.Undefined)
        return [
            self.b.shuffle_vector(
                vector, undefined, self.ir.Constant(self.vector(self.i32, lanes), list(picks))
            )
            for picks in (range(lanes), range(lanes, 2 * lanes))
        ]

    def sum(self, vector):
        """Sum of the lanes, the upper half onto the lower until one is left."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            low, high = self.halves(vector, lanes)
            vector = self.b.fadd(low, high)
        return self.b.extract_element(vector, self.i32(0))

    def tile(self, columns, w, x, y, k, y_stride, y_f32):
        """y[c] = x[c] . w for one row of the weight and `columns` of widened x, of length k.

        One row at a time is one stream of memory, which the hardware follows better than several. Each product has two
        sums, for the two parts of a block.
        """
        from numba.core import cgutils

        zero, f32s = self.constant(0.0), self.vector(self.f32)
        sums = [[cgutils.alloca_once(self.b, f32s) for _ in range(2)] for _ in range(columns)]
        for slot in (slot for pair in sums for slot in pair):
            self.b.store(zero, slot)
        xs = [self.at(x, (k, c * 4)) for c in range(columns)]

        def add_block(i):
            for part in range(2):
                weights = self.widened(self.at(w, (i, self.width)), part)
                for c in range(columns):
                    values = self.load(self.at(xs[c], (i, 4), (part, 4 * self.lanes)), f32s)
                    slot = sums[c][part]
                    self.b.store(self.fma(weights, values, self.b.load(slot)), slot)

        # A line of memory at a time: one prefetch for each.
        whole = self.b.and_(k, self.i64(-self.block))
        blocks = max(1, _LINE // (self.block * self.width))
        lines = self.b.and_(k, self.i64(-self.block * blocks))
        step = self.i64(self.block * blocks)
        with cgutils.for_range_slice(self.b, self.i64(0), lines, step, self.i64) as (i, _):
            for line in range(0, self.block * blocks * self.width, _LINE):
                self.prefetch(self.at(w, (i, self.width), (_AHEAD + line, 1)))
            for block in range(blocks):
                add_block(self.b.add(i, self.i64(block * self.block)))
        with cgutils.for_range_slice(self.b, lines, whole, self.i64(self.block), self.i64) as (i, _):
            add_block(i)

        totals = [cgutils.alloca_once(self.b, self.f32) for _ in range(columns)]
        for c, (first, second) in enumerate(sums):
            self.b.store(self.sum(self.b.fadd(self.b.load(first), self.b.load(second))), totals[c])
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            weight = self.widened_one(self.at(w, (i, self.width)))
            for c in range(columns):
                value = self.load(self.at(xs[c], (i, 4)), self.f32)
                self.b.store(self.fma(weight, value, self.b.load(totals[c])), totals[c])

        with self.b.if_else(self.b.icmp_signed("!=", y_f32, self.i64(0))) as (wide, narrow):
            with wide:
                for c in range(columns):
                    self.store(self.b.load(totals[c]), self.at(y, (y_stride, c * 4)))
            with narrow:
                for c in range(columns):
                    value = self.narrowed(self.b.load(totals[c]))
                    self.store(value, self.at(y, (y_stride, c * self.width)), self.width)

    def pack(self, x, to, k):
        """Widen k elements of x, in the order of `widened`."""
        from numba.core import cgutils

        whole = self.b.and_(k, self.i64(-self.block))
        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            for part in range(2):
                vector = self.widened(self.at(x, (i, self.width)), part)
                self.store(vector, self.at(to, (i, 4), (part, 4 * self.lanes)))
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            self.store(self.widened_one(self.at(x, (i, self.width))), self.at(to, (i, 4)))

    def constant(self, value, lanes=None):
        """A float32 vector of one value."""
        return self.ir.Constant(self.vector(self.f32, lanes), [value] * (lanes or self.lanes))

    def normalize(self, x, weight, eps, y, k):
        """y = weight * narrowed(x / rms(x)): k elements."""
        from numba.core import cgutils

        f32s = self.vector(self.f32)
        whole = self.b.and_(k, self.i64(-self.block))
        sums = [cgutils.alloca_once(self.b, f32s) for _ in range(2)]
        for slot in sums:
            self.b.store(self.constant(0.0), slot)
        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            for part, slot in enumerate(sums):
                value = self.widened(self.at(x, (i, self.width)), part)
                self.b.store(self.fma(value, value, self.b.load(slot)), slot)
        total = cgutils.alloca_once(self.b, self.f32)
        self.b.store(self.sum(self.b.fadd(*map(self.b.load, sums))), total)
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            value = self.widened_one(self.at(x, (i, self.width)))
            self.b.store(self.fma(value, value, self.b.load(total)), total)

        mean = self.b.fdiv(self.b.load(total), self.b.sitofp(k, self.f32))
        root = self.call("llvm.sqrt.f32", self.f32, self.b.fadd(mean, self.load(eps, self.f32)))
        scale = self.b.fdiv(self.ir.Constant(self.f32, 1.0), root)
        scales = self.broadcast(scale)
        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            place = self.at(x, (i, self.width))
            normed = [
                self.narrowed_in_place(self.b.fmul(self.widened(place, part), scales)) for part in range(2)
            ]
            place = self.at(weight, (i, self.width))
            scaled = [self.b.fmul(self.widened(place, part), normed[part]) for part in range(2)]
            self.store_block(scaled, self.at(y, (i, self.width)))
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            normed = self.narrowed_in_place(self.b.fmul(self.widened_one(self.at(x, (i, self.width))), scale))
            scaled = self.b.fmul(self.widened_one(self.at(weight, (i, self.width))), normed)
            self.store(self.narrowed(scaled), self.at(y, (i, self.width)), self.width)

    def narrowed_in_place(self, value):
        """float32, one or a vector, rounded to numbers that the dtype of the weight has."""
        lanes = getattr(value.type, "count", None)
        if self.kind == "f32":
            return value
        if self.kind == "f16":
            half = self.ir.HalfType()
            return self.b.fpext(
                self.b.fptrunc(value, self.vector(half, lanes) if lanes else half), value.type
            )
        bits = self.rounded(value)
        mask = self.ir.Constant(bits.type, [0xFFFF0000] * lanes if lanes else 0xFFFF0000)
        return self.b.bitcast(self.b.and_(bits, mask), value.type)

    def rotate(self, x, cosines, sines, y, half):
        """Rotates the pairs (i, i + half) of 2 * half elements by angles of float32 cosines and sines."""
        from numba.core import cgutils

        f32s = self.vector(self.f32)
        whole = self.b.and_(half, self.i64(-self.lanes))

        def turned(first, second, cosine, sine):
            return (
                self.b.fsub(self.b.fmul(first, cosine), self.b.fmul(second, sine)),
                self.b.fadd(self.b.fmul(second, cosine), self.b.fmul(first, sine)),
            )

        def places(base, i):
            return self.at(base, (i, self.width)), self.at(base, (i, self.width), (half, self.width))

        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.lanes), self.i64) as (i, _):
            angle = [self.load(self.at(table, (i, 4)), f32s) for table in (cosines, sines)]
            for value, place in zip(turned(*map(self.row, places(x, i)), *angle), places(y, i), strict=True):
                self.store_row(value, place)
        with cgutils.for_range_slice(self.b, whole, half, self.i64(1), self.i64) as (i, _):
            angle = [self.load(self.at(table, (i, 4)), self.f32) for table in (cosines, sines)]
            values = turned(*map(self.widened_one, places(x, i)), *angle)
            for value, place in zip(values, places(y, i), strict=True):
                self.store(self.narrowed(value), place, self.width)

    def row(self, address):
        """One vector of float32 from as many elements, in their order (`widened` has another for bfloat16)."""
        if self.kind == "bf16":
            halves = self.b.zext(self.load(address, self.vector(self.i16), align=2), self.vector(self.i32))
            shift = self.ir.Constant(halves.type, [16] * self.lanes)
            return self.b.bitcast(self.b.shl(halves, shift), self.vector(self.f32))
        return self.widened(address, 0)

    def store_row(self, value, address):
        """Store what `row` reads."""
        if self.kind == "bf16":
            bits = self.rounded(value)
            bits = self.b.lshr(bits, self.ir.Constant(bits.type, [16] * self.lanes))
            value = self.b.trunc(bits, self.vector(self.i16))
        elif self.kind == "f16":
            value = self.b.fptrunc(value, self.vector(self.ir.HalfType()))
        self.store(value, address, self.width)

    def copy(self, to, source, size):
        """Copies bytes."""
        pointer = self.ir.IntType(8).as_pointer()
        places = [self.b.inttoptr(address, pointer) for address in (to, source)]
        no = self.ir.Constant(self.ir.IntType(1), 0)
        self.call("llvm.memcpy.p0.p0.i64", self.ir.VoidType(), *places, size, no)

    def exponentials(self, row, count, scale):
        """Make scores into softmax weights in place, exp(scale * (score - best)), and return the address of their sum.

        `count` scores, a multiple of the lanes; the sum goes to the first element behind them. Element i is added in
        lane i mod lanes, so that the sum's bits do not depend on who computed which scores. Within 2 ulp (the range
        reduction and polynomial of the Cephes library).
        """
        from numba.core import cgutils

        f32s, size = self.vector(self.f32), self.i64(self.lanes)
        best = cgutils.alloca_once_value(self.b, self.constant(float("-inf")))
        self.b.store(self.constant(float("-inf")), best)
        with cgutils.for_range_slice(self.b, self.i64(0), count, size, self.i64) as (i, _):
            scores, known = self.load(self.at(row, (i, 4)), f32s), self.b.load(best)
            self.b.store(self.b.select(self.b.fcmp_ordered(">", scores, known), scores, known), best)
        vector, lanes = self.b.load(best), self.lanes
        while lanes > 1:
            lanes //= 2
            low, high = self.halves(vector, lanes)
            vector = self.b.select(self.b.fcmp_ordered(">", low, high), low, high)
        best = self.broadcast(self.b.extract_element(vector, self.i32(0)))
        factor = self.broadcast(self.load(scale, self.f32))

        total = cgutils.alloca_once_value(self.b, self.constant(0.0))
        self.b.store(self.constant(0.0), total)
        with cgutils.for_range_slice(self.b, self.i64(0), count, size, self.i64) as (i, _):
            place = self.at(row, (i, 4))
            x = self.b.fmul(self.b.fsub(self.load(place, f32s), best), factor)
            weights = self.exponential(x)
            self.store(weights, place)
            self.b.store(self.b.fadd(self.b.load(total), weights), total)
        self.store(self.sum(self.b.load(total)), self.at(row, (count, 4)))

    def exponential(self, x):
        """exp(x) for x <= 0, lane by lane."""
        floor = self.constant(-87.0)
        x = self.b.select(self.b.fcmp_ordered("<", x, floor), floor, x)  # a NaN stays one
        magic = self.constant(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
        shifted = self.fma(x, self.constant(1.4426950408889634), magic)
        n = self.b.fsub(shifted, magic)
        x = self.fma(n, self.constant(-0.693359375), x)
        x = self.fma(n, self.constant(2.12194440e-4), x)
        p = self.constant(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, x, self.constant(c))
        p = self.b.fadd(self.fma(self.b.fmul(p, x), x, x), self.constant(1.0))
        i32s = self.vector(self.i32)
        exponent = self.b.shl(self.b.bitcast(shifted, i32s), self.ir.Constant(i32s, [23] * self.lanes))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, i32s), exponent), self.vector(self.f32))

    def accumulate(self, vectors, values, stride, weights, count, sums):
        """sums += weights[i] * values[i] for i < count, on `vectors` vectors of columns, in the order of `pack`."""
        from numba.core import cgutils

        f32s = self.vector(self.f32)
        slots = [cgutils.alloca_once(self.b, f32s) for _ in range(vectors)]
        for v, slot in enumerate(slots):
            self.b.store(self.load(self.at(sums, (v, 4 * self.lanes)), f32s), slot)
        with cgutils.for_range_slice(self.b, self.i64(0), count, self.i64(1), self.i64) as (i, _):
            weight = self.broadcast(self.load(self.at(weights, (i, 4)), self.f32))
            for v, slot in enumerate(slots):
                block, part = divmod(v, 2)
                place = self.at(values, (i, stride), (block, self.block * self.width))
                self.b.store(self.fma(self.widened(place, part), weight, self.b.load(slot)), slot)
        for v, slot in enumerate(slots):
            self.store(self.b.load(slot), self.at(sums, (v, 4 * self.lanes)))

    def accumulate_one(self, values, stride, weights, count, sums):
        """`accumulate` for one column that does not fill a block."""
        from numba.core import cgutils

        slot = cgutils.alloca_once(self.b, self.f32)
        self.b.store(self.load(sums, self.f32), slot)
        with cgutils.for_range_slice(self.b, self.i64(0), count, self.i64(1), self.i64) as (i, _):
            weight, value = (
                self.load(self.at(weights, (i, 4)), self.f32),
                self.widened_one(self.at(values, (i, stride))),
            )
            self.b.store(self.fma(value, weight, self.b.load(slot)), slot)
        self.store(self.b.load(slot), sums)

    def quotient(self, sums, total, out, k):
        """out = sums / total: k elements, from the order of `pack` to that of memory."""
        from numba.core import cgutils

        divisor = self.load(total, self.f32)
        whole = self.b.and_(k, self.i64(-self.block))
        with cgutils.for_range_slice(self.b, self.i64(0), whole, self.i64(self.block), self.i64) as (i, _):
            parts = [
                self.b.fdiv(
                    self.load(self.at(sums, (i, 4), (part, 4 * self.lanes)), self.vector(self.f32)),
                    self.broadcast(divisor),
                )
                for part in range(2)
            ]
            self.store_block(parts, self.at(out, (i, self.width)))
        with cgutils.for_range_slice(self.b, whole, k, self.i64(1), self.i64) as (i, _):
            value = self.b.fdiv(self.load(self.at(sums, (i, 4)), self.f32), divisor)
            self.store(self.narrowed(value), self.at(out, (i, self.width)), self.width)

    def atomic_add(self, base, i, value):
        """Adds to a word, and returns what it was."""
        pointer = self.b.inttoptr(self.at(base, (i, 8)), self.i64.as_pointer())
        return self.b.atomic_rmw("add", pointer, value, "seq_cst")

    def atomic_load(self, base, i):
        """Reads a word that other threads write."""
        pointer = self.b.inttoptr(self.at(base, (i, 8)), self.i64.as_pointer())
        return self.b.load_atomic(pointer, "acquire", 8)

    def enter(self, function, argument):
        """Call a C function of one pointer that returns a pointer."""
        signature = self.ir.FunctionType(self.i64, [self.i64])
        return self.b.call(self.b.inttoptr(function, signature.as_pointer()), [argument])


def float32_lanes() -> int:
    """Numbers in one vector of float32 on this host."""
    lanes = vector_lanes()
    if lanes is None:
        raise RuntimeError("the CPU kernels need AVX2, FMA and F16C; ask `supported()` first")
    return lanes


def instruction(kind: str, emit: Callable, arguments: int, result=None):
    """A function for compiled code, made from one that emits instructions for LLVM integers."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    lanes = float32_lanes()
    returned = result or types.void

    @intrinsic
    def function(typing_context, *operands):
        def codegen(context, builder, signature, values):
            value = emit(Emit(builder, kind, lanes), *cgutils.unpack_tuple(builder, values[0]))
            return context.get_dummy_value() if returned is types.void else value

        return returned(types.StarArgTuple.from_types([types.int64] * arguments)), codegen

    return function


@functools.cache
def words() -> tuple[Callable, ...]:
    """`word(base, i)`, `put(base, i, value)` and, atomic, `add(base, i, value)`, `peek(base, i)`: on 8-byte words."""
    from numba import types

    return (
        instruction("f32", lambda e, base, i: e.load(e.at(base, (i, 8)), e.i64, 8), 2, types.int64),
        instruction("f32", lambda e, base, i, value: e.store(value, e.at(base, (i, 8)), 8), 3),
        instruction("f32", Emit.atomic_add, 3, types.int64),
        instruction("f32", Emit.atomic_load, 2, types.int64),
    )

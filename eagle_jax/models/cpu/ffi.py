"""Handlers for XLA's FFI in compiled code, and the sharing of one call's work among the threads of XLA's pool.

A kernel is two functions: `begin` reads the call and describes the work in a job, `run` does one chunk of it. Chunks go
to whichever thread asks next. The threads of a job share words: counters, then what the kernel itself has put there.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import jax

from eagle_jax.models.cpu.emit import Emit, instruction, words

_SPINS = 4000  # looks at the counter before the core is offered to others

# XLA's FFI (xla/ffi/api/c_api.h in jaxlib): two enum values, the version that this is written against (minor
# versions only append), and where fields lie. Structs are read as 8-byte words; numbers are offsets in words.
DTYPE_F32 = 11
_EXTENSION_METADATA = 1
_API_MAJOR, _API_MINOR = 0, 3
_FRAME_EXTENSION, _FRAME_API, _FRAME_CTX = 1, 2, 3
FRAME_ARGS_SIZE, _FRAME_ARGS, _FRAME_RETS = 7, 9, 14
_BUFFER_DTYPE, _BUFFER_DATA, _BUFFER_DIMS = 2, 3, 5
_API_ERROR_DESTROY, _API_SCHEDULE, _API_NUM_THREADS = 8, 17, 18

# Words of a job. CHUNKS, HELPERS (more threads than this one that are worth waking), JOB_SCRATCH (bytes that each
# thread needs for itself) and those from JOB_OWN on are for `begin` to fill.
_NEXT, _DONE, _USERS = 0, 8, 9  # next chunk to take, chunks finished, threads that may still look at the job
_CALL = 10  # six words: argument struct of calls into XLA
CHUNKS, HELPERS, JOB_SCRATCH, _ROWS, _STEP, JOB_OWN = 16, 17, 18, 19, 20, 24
_CHUNK_ELEMENTS = 64 * 1024  # taken by a thread at a time, where rows are done one by one


def register(name: str, kind: str, handler: Callable[[str], object]) -> str:
    """Compile a handler for one stored dtype, once a process, and tell XLA its name, which is returned."""
    with _lock:  # two threads may trace at once
        return _register_once(name, kind, handler)


_lock = threading.Lock()


@functools.cache
def _register_once(name: str, kind: str, handler: Callable[[str], object]) -> str:
    target = f"eagle_jax_cpu_{name}_{kind}"
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler(kind).address))  # type: ignore[attr-defined]
    jax.ffi.register_ffi_target(target, capsule, platform="cpu", api_version=1)
    return target


@functools.cache
def frame() -> SimpleNamespace:
    """Readers of a call: `arg(call, i)` and `ret(call, i)` are buffers, of which `data(b)`, `dim(b, i)`, `dtype(b)`."""
    from numba import types

    def reader(arguments: int, *path: int | None) -> Callable:
        """Follows pointers: words of these numbers, None for the next argument's."""

        def emit(e: Emit, base, *indices):
            rest = iter(indices)
            for word in path:
                base = e.load(e.at(base, (next(rest) if word is None else word, 8)), e.i64, 8)
            return base

        return instruction("f32", emit, arguments, types.int64)

    return SimpleNamespace(
        arg=reader(2, _FRAME_ARGS, None),
        ret=reader(2, _FRAME_RETS, None),
        data=reader(1, _BUFFER_DATA),
        dim=reader(2, _BUFFER_DIMS, None),
        dtype=instruction(
            "f32", lambda e, b: e.b.zext(e.load(e.at(b, (_BUFFER_DTYPE, 8)), e.i32), e.i64), 1, types.int64
        ),
    )


@functools.cache
def int32() -> Callable:
    """`int32(base, i)`: a number of an int32 buffer."""
    from numba import types

    return instruction(
        "f32", lambda e, base, i: e.b.sext(e.load(e.at(base, (i, 4)), e.i32), e.i64), 2, types.int64
    )


def memory() -> tuple[Callable, Callable]:
    """The C library's malloc and free, on integers."""
    libc = ctypes.CDLL(None)
    malloc, free = libc.malloc, libc.free
    malloc.argtypes, malloc.restype = [ctypes.c_int64], ctypes.c_int64
    free.argtypes, free.restype = [ctypes.c_int64], None
    return malloc, free


def compile_handler(begin: Callable, run: Callable):
    """The FFI handler that has the chunks of a job done.

    Args:
        begin: (call frame) -> job from `malloc`, described.
        run: (job, chunk, scratch), called once for each chunk below CHUNKS.

    Returns it as a numba cfunc, with the function that helpers run as its attribute: code lives as long as these do.
    """
    from numba import cfunc, njit, types

    int64 = types.int64
    inlined = functools.partial(njit, inline="always")
    word, put, add, peek = words()
    enter = instruction("f32", Emit.enter, 2, int64)
    malloc, free = memory()
    sched_yield = ctypes.CDLL(None).sched_yield
    sched_yield.argtypes, sched_yield.restype = [], ctypes.c_int

    @inlined
    def leave(job):
        if add(job, _USERS, -1) == 1:
            free(job)

    @cfunc(int64(int64), error_model="numpy")
    def help_out(job):
        """Take chunks until none is left."""
        chunk = add(job, _NEXT, 1)
        if chunk < word(job, CHUNKS):
            size = word(job, JOB_SCRATCH)
            scratch = malloc(size) if size > 0 else 0
            while chunk < word(job, CHUNKS):
                run(job, chunk, scratch)
                add(job, _DONE, 1)
                chunk = add(job, _NEXT, 1)
            if size > 0:
                free(scratch)
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

        # On the heap and counted, since a helper may start after the work is done and this call has returned.
        job = begin(frame)
        put(job, _NEXT, 0)
        put(job, _DONE, 0)
        chunks, helpers = word(job, CHUNKS), word(job, HELPERS)
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

    handler.help_out = help_out
    return handler


def compile_rows_handler(size: int, describe: Callable, row: Callable):
    """The FFI handler of an operation on rows, each on its own.

    Args:
        size: words of the job from JOB_OWN on.
        describe: (call frame, job), fills these, and returns the number of rows and of elements in one.
        row: (job, i), does row i.
    """
    from numba import njit

    inlined = functools.partial(njit, inline="always")
    word, put, _, _ = words()
    malloc, _ = memory()

    @inlined
    def begin(call):
        job = malloc(8 * (JOB_OWN + size))
        rows, elements = describe(call, job)
        step = max(1, _CHUNK_ELEMENTS // max(elements, 1))
        put(job, _ROWS, rows)
        put(job, _STEP, step)
        put(job, CHUNKS, (rows + step - 1) // step)
        put(job, HELPERS, (rows + step - 1) // step - 1)
        put(job, JOB_SCRATCH, 0)
        return job

    @inlined
    def run(job, chunk, scratch):
        step = word(job, _STEP)
        for i in range(chunk * step, min(chunk * step + step, word(job, _ROWS))):
            row(job, i)

    return compile_handler(begin, run)

"""Kernels for few rows on CPUs, where XLA's own code leaves most of the speed of memory unused.

They are compiled at first use by numba (the optional extra `cpu`), run on XLA's own thread pool, and keep one promise
that XLA does not make: the bits of a row's result depend on what this row reads only, not on how many rows are computed
beside it or by which threads. A verification step over a tree thus gives exactly what one-token steps give.

`matmul` streams weights once for all rows; `attention` is a whole attention layer's middle, from rotated queries to the
weighted values. Neither is differentiable or can be vmapped or partitioned: `eagle_jax.models.kernels` says where they
are used.
"""

import functools
import importlib.util
import os

import jax

MAX_ROWS = 64
"""More rows than this are left to XLA, whose packing pays by then."""


def supported() -> bool:
    """Whether the kernels run here: a CPU backend, POSIX, and numba installed.

    EAGLE_JAX_CPU_KERNEL=0 in the environment says no for the process (looked at when a function is traced).
    """
    return (
        os.environ.get("EAGLE_JAX_CPU_KERNEL", "1") != "0"
        and os.name == "posix"
        and importlib.util.find_spec("numba") is not None
        and jax.default_backend() == "cpu"
        and vector_lanes() is not None
    )


@functools.cache
def vector_lanes() -> int | None:
    """Numbers in one of the host's vectors of float32; None for a host too old for the kernels."""
    import llvmlite.binding as llvm

    if not llvm.get_process_triple().startswith(("x86_64", "i686")):
        return 4  # NEON and its like
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if all(features.get(f) for f in ("avx2", "fma", "f16c")) else None

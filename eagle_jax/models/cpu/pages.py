"""Large pages for weights that stay in memory: reading them once a token is reading all of the address space."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import jax

_HUGE = 2 << 20  # bytes of a large page
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; the second since Linux 6.1


def use_large_pages(arrays: Iterable[jax.Array]) -> None:
    """Ask Linux to keep arrays that lie in this host's memory in pages of 2 MiB.

    With pages of 4 KiB, a product that streams a gigabyte of weights waits for a quarter million address translations,
    a tenth of its time and more. It is a hint: kernels without large pages, other systems and arrays on other devices
    are left as they are, and no value changes.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform != "cpu" or shard.data.nbytes < _HUGE // 8:
                continue
            begin = shard.data.unsafe_buffer_pointer()
            end = begin + shard.data.nbytes
            # Neighbours share the first and the last page; where they cannot, the pages wholly inside remain.
            outer = begin // _HUGE * _HUGE, -(-end // _HUGE) * _HUGE
            inner = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            for low, high in (outer, inner):
                if high <= low:
                    continue
                madvise(low, high - low, _MADV_HUGEPAGE)
                if madvise(low, high - low, _MADV_COLLAPSE) == 0:
                    break

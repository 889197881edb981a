"""Which kernels the functions being traced may use: a choice of the devices that they will run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jax.sharding import Mesh

from eagle_jax.models import cpu
from eagle_jax.models.cpu.emit import KINDS

_ON_CPU: ContextVar[bool] = ContextVar("on_cpu", default=False)


@contextlib.contextmanager
def kernels_for(mesh: Mesh) -> Iterator[None]:
    """While tracing for `mesh`: on a single CPU device, operations on few rows go to the kernels of `models.cpu`.

    A custom call cannot be partitioned, so on several devices they stay XLA's.
    """
    token = _ON_CPU.set(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu")
    try:
        yield
    finally:
        _ON_CPU.reset(token)


def on_cpu() -> bool:
    """Whether the trace is for one CPU device."""
    return _ON_CPU.get()


def cpu_kernels(dtype: Any, rows: int = 1) -> bool:
    """Whether operations on so many rows go to the CPU kernels; those that do well with any number need not say."""
    return on_cpu() and dtype.name in KINDS and 1 <= rows <= cpu.MAX_ROWS and cpu.supported()

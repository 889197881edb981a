"""Whether what is about to be allocated fits the devices, told before they run out of memory."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from eagle_jax.errors import EagleError


class CapacityError(EagleError):
    """More memory is asked for than a device has."""


def device_bytes(mesh: Mesh) -> int:
    """Memory of one device of the mesh; a CPU's devices share the machine's."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // mesh.size if device.platform == "cpu" else machine


def check_fits(mesh: Mesh, weights: int, caches: int, passing: int, what: str) -> None:
    """Refuses batches that cannot fit beside the weights.

    Args:
        weights: bytes of the weights on one device.
        caches: bytes of the caches, split over the whole mesh.
        passing: bytes of what the largest pass makes and drops, split over the whole mesh.
        what: how the caches came to be so large, such as "batch_size 8 x 131072 tokens".

    Raises:
        CapacityError: it cannot fit.
    """
    limit, need, more = device_bytes(mesh), caches // mesh.size, passing // mesh.size
    if weights + need + more > limit:
        gib = 2**30
        raise CapacityError(
            f"{what} takes {need / gib:.1f} GiB of KV cache and {more / gib:.1f} GiB of activations a device; with "
            f"{weights / gib:.1f} GiB of weights that is "
            f"more than its {limit / gib:.1f} GiB. "
            "Lower max_model_len, max_new_tokens or batch_size, or use more devices"
        )

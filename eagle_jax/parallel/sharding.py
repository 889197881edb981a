"""Where arrays live: logical axes of every array, and one table that maps them to the mesh.

Modules and states name what a dimension *is* ("heads", "vocab", "batch"); only this file knows which axis of
the mesh it is split over. Another layout is another table, not another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, str | tuple[str, ...] | None]

# Tensor parallelism splits heads, ffn and vocabulary, so that a layer needs one all-reduce after attention
# and one after the MLP; fsdp splits the other dimension of each weight, which is gathered where it is used.
TARGET_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "embed": "fsdp",
}
# A head is small: splitting it over fsdp would cost a gather a draft pass and save little.
HEAD_RULES: Rules = {**TARGET_RULES, "embed": None}


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """The mesh axes of an array whose dimensions are `axes`."""
    return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))


def shardings(axes: Any, mesh: Mesh, rules: Rules) -> Any:
    """A pytree of shardings from a pytree whose leaves are tuples of logical axes (`()`: an empty pytree)."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, partition_spec(leaf, rules)), axes, is_leaf=_is_axes)


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(v is None or isinstance(v, str) for v in value)

"""Device meshes with the axes `data`, `fsdp` and `tensor`, and which of them a model can be split over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

from eagle_jax.errors import EagleError
from eagle_jax.models.config import ModelConfig

AXES = ("data", "fsdp", "tensor")


class MeshError(EagleError):
    """A mesh that these devices or this model do not allow."""


@dataclass(frozen=True)
class MeshShape:
    """How many ways each axis is split."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Devices that it takes."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"{{data: {self.data}, fsdp: {self.fsdp}, tensor: {self.tensor}}}"


def check_mesh(shape: MeshShape, model: ModelConfig, batch_size: int, name: str = "the target") -> None:
    """Refuses a mesh that `model` or the batch cannot be split over, and names the nearest one that works.

    Raises:
        MeshError: an axis does not divide what it splits.
    """
    split = {
        "tensor": {
            "heads": model.num_heads,
            "KV heads": model.num_kv_heads,
            "ffn width": model.intermediate_size,
            "vocabulary": model.vocab_size,
        },
        "fsdp": {"hidden size": model.hidden_size, "batch size": batch_size},
        "data": {"batch size": batch_size},
    }
    problems = [
        f"{axis} {getattr(shape, axis)} does not divide {name}'s {what} {size}"
        for axis, sizes in split.items()
        for what, size in sizes.items()
        if size % getattr(shape, axis)
    ]
    if not problems and batch_size % (shape.data * shape.fsdp):
        problems.append(
            f"data x fsdp = {shape.data * shape.fsdp} does not divide the batch size {batch_size}"
        )
    if problems:
        nearest = _nearest(shape, split, batch_size)
        raise MeshError(
            f"mesh {shape} is not possible: {'; '.join(problems)}. The nearest legal mesh is {nearest}"
        )


def _nearest(shape: MeshShape, split: dict[str, dict[str, int]], batch_size: int) -> MeshShape:
    def legal(axis: str) -> list[int]:
        divisor = math.gcd(*split[axis].values())
        return [n for n in range(1, divisor + 1) if divisor % n == 0]

    candidates = [
        MeshShape(data, fsdp, tensor)
        for data in legal("data")
        for fsdp in legal("fsdp")
        for tensor in legal("tensor")
        if batch_size % (data * fsdp) == 0 and data * fsdp * tensor <= shape.size
    ]

    def distance(other: MeshShape) -> tuple[float, int]:
        ratios = (abs(math.log(getattr(other, axis) / getattr(shape, axis))) for axis in AXES)
        return sum(ratios), -other.size

    return min(candidates, key=distance)


def make_mesh(shape: MeshShape) -> Mesh:
    """A mesh over the first devices of this process's platform.

    Raises:
        MeshError: fewer devices than it takes.
    """
    devices = jax.devices()
    if shape.size > len(devices):
        raise MeshError(
            f"mesh {shape} takes {shape.size} devices, and there are {len(devices)} ({devices[0].platform})"
        )
    return jax.make_mesh(
        (shape.data, shape.fsdp, shape.tensor),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[: shape.size],
    )

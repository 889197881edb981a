"""Fills parameters from a checkpoint, one tensor at a time, straight to their places on the devices.

The caller brings the table that says which tensor fills which parameter; nothing here knows a model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.source import CheckpointError, TensorInfo, TensorSource, convertible

_LISTED = 20

Transform = Callable[[np.ndarray], np.ndarray]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Rule:
    """Which parameter the tensors of some name fill.

    Attributes:
        pattern: a regular expression that must match the whole name of the tensor.
        path: the parameter's path, in which `\\1` is the pattern's first group; None leaves the tensor out
            on purpose.
        transform: applied to the tensor before its shape is checked.
    """

    pattern: str
    path: str | None
    transform: Transform | None = None


RuleLike = Rule | tuple[str, str | None] | tuple[str, str | None, Transform | None]


@dataclass(frozen=True)
class _Fill:
    """One parameter to fill."""

    name: str
    path: str
    info: TensorInfo
    transform: Transform | None
    wanted: jax.ShapeDtypeStruct
    dtype: np.dtype


def load_parameters(
    source: TensorSource,
    table: Sequence[RuleLike],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    cast: Any = None,
    progress: Progress | None = None,
    subset: bool = False,
) -> dict[str, jax.Array]:
    """Returns the parameters of `abstract`, filled from a checkpoint.

    Floats are converted to the dtype of `abstract`, integers too if their values fit; nothing else changes
    its kind. The largest tensors are read first, so that the host holds little more than the parameters at
    any time.

    Args:
        source: an opened checkpoint.
        table: rules tried in order on each tensor's name, the first that matches decides.
        abstract: shape, dtype and, if wanted, sharding of each parameter by its dotted path.
        cast: a float dtype for all floating parameters, instead of those in `abstract`.
        progress: called after each tensor with the bytes read, the bytes to read in all, and the tensor's
            name.
        subset: `abstract` is a part of what the checkpoint holds: tensors that fill nothing in it are left
            unread.

    Raises:
        CheckpointError: lists all parameters that no tensor fills, tensors that fill no parameter, and
            tensors of another shape or kind than wanted.
    """
    fills, problems = _plan(source, table, abstract, cast, subset)
    total, done = sum(fill.info.nbytes for fill in fills), 0
    parameters: dict[str, jax.Array] = {}
    for fill in sorted(fills, key=lambda fill: (-fill.info.nbytes, fill.path)):
        if problems and fill.transform is None:
            continue  # it is only left to find what else is wrong
        value = source.read(fill.name)
        if fill.transform is not None:
            value = fill.transform(value)
            problems += _misfits(fill, TensorInfo(value.shape, value.dtype))
        problems += _out_of_range(fill, value)
        if not problems:
            parameters[fill.path] = place(value, fill.wanted, fill.dtype)
            done += fill.info.nbytes
            if progress is not None:
                progress(done, total, fill.name)
        del value  # its memory goes before the next is read
    if problems:
        raise CheckpointError(
            describe_problems(f"{source.path} does not hold what is to be filled", problems)
        )
    return {path: parameters[path] for path in abstract}


def place(value: np.ndarray, wanted: jax.ShapeDtypeStruct, dtype: Any = None) -> jax.Array:
    """Returns a copy of `value` on the devices that `wanted.sharding` says, each getting its own slice
    only."""
    dtype = np.dtype(wanted.dtype if dtype is None else dtype)
    if wanted.sharding is None:
        return _put(value.astype(dtype, copy=False), None)
    # A slice that several devices hold is converted once.
    slices: dict[str, np.ndarray] = {}
    shards = []
    for device, index in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
        key = str(index)
        if key not in slices:
            slices[key] = np.asarray(value[index]).astype(dtype, copy=False)
        shards.append(_put(slices[key], device))
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, shards, dtype=dtype)


def _put(value: np.ndarray, device: jax.Device | None) -> jax.Array:
    value = np.require(value, requirements="A")
    array = jax.device_put(value, device)
    # The CPU backend may share numpy's memory, here perhaps a view of a file, even when told not to. Among
    # its own arrays it does as told.
    (holder,) = array.devices()
    if holder.platform == "cpu" and array.unsafe_buffer_pointer() == value.ctypes.data:
        array = jax.device_put(array, device, may_alias=False)
    return jax.block_until_ready(array)  # one tensor in flight, not all of them


def describe_problems(what: str, problems: Sequence[str]) -> str:
    """Returns one message that lists problems, the first of them when there are too many to read."""
    shown = [f"  {problem}" for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        shown.append(f"  … and {len(problems) - _LISTED} more")
    return "\n".join([f"{what} ({len(problems)} problem{'s' if len(problems) > 1 else ''}):", *shown])


def describe(wanted: jax.ShapeDtypeStruct) -> str:
    """Returns shape and dtype as errors write them."""
    return str(TensorInfo(tuple(wanted.shape), np.dtype(wanted.dtype)))


def _plan(
    source: TensorSource,
    table: Sequence[RuleLike],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    cast: Any,
    subset: bool,
) -> tuple[list[_Fill], list[str]]:
    rules = [rule if isinstance(rule, Rule) else Rule(*rule) for rule in table]
    compiled = [(re.compile(rule.pattern), rule) for rule in rules]
    fills: dict[str, _Fill] = {}
    missing, unexpected, misfits = [], [], []
    for name, info in source.infos.items():
        match, rule = next(
            ((m, rule) for regex, rule in compiled if (m := regex.fullmatch(name))), (None, None)
        )
        if match is None or rule is None:
            if not subset:
                unexpected.append(f"unexpected: {name} {info}, which no rule of the table names")
            continue
        if rule.path is None:
            continue
        path = match.expand(rule.path)
        if path not in abstract:
            if not subset:
                unexpected.append(f"unexpected: {name} {info}, since there is no parameter {path}")
            continue
        if path in fills:
            unexpected.append(f"unexpected: {name} {info}, since {fills[path].name} fills {path} already")
            continue
        wanted = abstract[path]
        dtype = np.dtype(wanted.dtype)
        if cast is not None and jnp.issubdtype(dtype, jnp.floating):
            dtype = np.dtype(cast)
        fills[path] = _Fill(name, path, info, rule.transform, wanted, dtype)
        if rule.transform is None:
            misfits += _misfits(fills[path], info)
    missing = [
        f"missing: {path} {describe(wanted)}" for path, wanted in abstract.items() if path not in fills
    ]
    return list(fills.values()), missing + unexpected + misfits


def _misfits(fill: _Fill, info: TensorInfo) -> list[str]:
    of = "" if fill.transform is None else " after its transform"
    if tuple(info.shape) != tuple(fill.wanted.shape) or not convertible(info.dtype, fill.dtype):
        return [f"misshapen: {fill.name} is {info}{of}; {fill.path} needs {describe(fill.wanted)}"]
    return []


def _out_of_range(fill: _Fill, value: np.ndarray) -> list[str]:
    if value.dtype == fill.dtype or not jnp.issubdtype(fill.dtype, jnp.integer) or not value.size:
        return []
    low, high, limits = int(value.min()), int(value.max()), jnp.iinfo(fill.dtype)
    if limits.min <= low and high <= limits.max:
        return []
    return [f"out of range: {fill.name} has values from {low} to {high}; {fill.path} is {fill.dtype.name}"]

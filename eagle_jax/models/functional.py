"""Modules define, plain JAX runs: a module class becomes a static graph and a flat dict of parameters.

Parameters are one flat dict, `{"layers.0.mlp.up_proj.weight": array}`: jitted functions take it as an
argument, checkpoints are read into it by name, and the rules of `eagle_jax.parallel` place it by each entry's
logical axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)
Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class ParameterSpec:
    """Shape, dtype and logical axes (one name or None a dimension) of one parameter."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


@dataclass(frozen=True)
class Functional(Generic[Module]):
    """The static half of a module. Hashable by identity, so jitted functions may close over it."""

    graphdef: nnx.GraphDef
    variables: tuple[tuple[tuple[Any, ...], nnx.Variable], ...]

    def __hash__(self) -> int:
        return hash(self.graphdef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Functional) and self.graphdef == other.graphdef

    @classmethod
    def of(cls, build: Callable[[], Module]) -> Functional[Module]:
        """Traces `build` without allocating anything."""
        graphdef, state = nnx.split(nnx.eval_shape(build))
        return cls(graphdef, tuple(nnx.to_flat_state(state)))

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Every parameter by its dotted path."""
        return {
            _dotted(path): ParameterSpec(v.shape, v.dtype, v.get_metadata()["logical_axes"])
            for path, v in self.variables
        }

    def bind(self, params: Params) -> Module:
        """The module with these parameters; inside a trace this costs nothing at run time."""
        state = nnx.from_flat_state([(path, v.replace(params[_dotted(path)])) for path, v in self.variables])
        return nnx.merge(self.graphdef, state)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))

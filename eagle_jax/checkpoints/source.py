"""What every checkpoint format offers: tensors by name, read one at a time, and a Hugging Face style config.

Nothing here touches a device or a model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import EagleError


class CheckpointError(EagleError):
    """A checkpoint that cannot be read or written: says what was given, what was expected and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor as `TensorSource.read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint opened for reading.

    Attributes:
        path: the file or folder that was opened.
        config: the checkpoint's config, with Hugging Face's keys.
        infos: shape and dtype of every tensor, known without reading any.
    """

    path: Path
    config: dict[str, Any]
    infos: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, read-only, in the dtype of `infos`; its memory is freed with the array.

        Raises:
            CheckpointError: no tensor has this name, or the file is damaged.
        """
        ...


def convertible(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether a tensor may be stored as another dtype: floats as floats, integers as integers, else only as
    itself."""
    if given == wanted:
        return True
    return any(
        jax.dtypes.issubdtype(given, kind) and jax.dtypes.issubdtype(wanted, kind)
        for kind in (jnp.floating, jnp.integer)
    )


def unknown_tensor(path: Path, name: str) -> CheckpointError:
    """The error for a name that a source does not have."""
    return CheckpointError(f"{path} has no tensor named {name!r}; `infos` lists those that it has")


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON file that must hold an object.

    Raises:
        CheckpointError: the file is missing, is not JSON or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, which this kind of checkpoint needs"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, and holds a {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

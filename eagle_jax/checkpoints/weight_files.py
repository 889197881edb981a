"""One file of weights: safetensors, or what PyTorch saves.

Both are mapped into memory a tensor at a time, and the map goes with the array, so that a model never
stands twice in the host's memory. PyTorch files need torch, safetensors files do not.
"""

import importlib
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from eagle_jax.checkpoints.source import CheckpointError, TensorInfo, unknown_tensor

_SAFETENSORS_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_REOPEN_BYTES = 256 * 2**20


class WeightFile(Protocol):
    """One file of weights, opened."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of its tensors."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor; see `TensorSource.read`."""
        ...


class SafetensorsFile:
    """One safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        header, start, size = self._header()
        end_of_data = start
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                dtype = _SAFETENSORS_DTYPES.get(dtype_name)
                if dtype is None:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} has dtype {dtype_name}; expected one of "
                        f"{', '.join(_SAFETENSORS_DTYPES)}"
                    )
                info = TensorInfo(shape, dtype)
                fits = begin >= 0 and end - begin == info.nbytes
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise self._damaged(f"the entry of tensor {name!r} makes no sense") from None
            if not fits:
                raise self._damaged(f"tensor {name!r} is {info}, which does not fill bytes {begin} to {end}")
            self.infos[name] = info
            self._offsets[name] = start + begin
            end_of_data = max(end_of_data, start + end)
        if end_of_data > size:
            raise self._damaged(
                f"it has {size} bytes and its header speaks of {end_of_data}, so it is truncated"
            )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a whole safetensors file: {what}; fetch the file again")

    def _header(self) -> tuple[dict[str, Any], int, int]:
        """Returns the header, where the data starts, and the file's size."""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                    raise self._damaged(f"the header would take {length} of {size} bytes")
                header = json.loads(file.read(length))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror})") from None
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise self._damaged("the header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("the header is not a JSON object")
        return header, 8 + length, size

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only map of its part of the file, unmapped with the array."""
        if name not in self.infos:
            raise unknown_tensor(self.path, name)
        return map_array(self.path, self._offsets[name], self.infos[name])


def map_array(path: Path, offset: int, info: TensorInfo) -> np.ndarray:
    """Returns a read-only map of a part of a file; its pages are released with the array.

    Raises:
        CheckpointError: the file has gone or shrunk.
    """
    if info.nbytes == 0:  # nothing can be mapped
        return np.broadcast_to(np.zeros((), info.dtype), info.shape)
    try:
        mapped = np.memmap(path, mode="r", offset=offset, shape=(info.nbytes,), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be mapped into memory any more ({error}); was it replaced?"
        ) from None
    return mapped.view(np.ndarray).view(info.dtype).reshape(info.shape)


class TorchFile:
    """One file of PyTorch tensors by name, read with `weights_only`, so that no code in it runs.

    Raises:
        CheckpointError: torch is not installed, or the file is damaged or holds other things than tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self._torch = _import_torch(path)
        self._touched = 0
        self._tensors = self._load()
        self.infos: dict[str, TensorInfo] = {}
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, self._torch.Tensor):
                raise CheckpointError(
                    f"{path}: {name!r} is a {type(tensor).__name__}; expected tensors by name only"
                )
            self.infos[name] = TensorInfo(tuple(tensor.shape), _numpy_dtype(path, name, tensor))

    def _load(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise CheckpointError(f"{self.path} is missing; fetch it again")
        try:
            # Files from before PyTorch 1.6 are no archives and cannot be mapped.
            tensors = self._torch.load(
                self.path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.path)
            )
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0][:120]
            raise CheckpointError(
                f"{self.path} cannot be read as PyTorch weights ({reason}); fetch the file again"
            ) from None
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{self.path} holds a {type(tensors).__name__}; expected tensors by name")
        return tensors

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a view of the mapped file."""
        if name not in self.infos:
            raise unknown_tensor(self.path, name)
        # The map is of the whole file: opening it anew lets go of the pages read so far.
        if self._touched > _REOPEN_BYTES:
            self._tensors = {}
            self._tensors = self._load()
            self._touched = 0
        info, tensor = self.infos[name], self._tensors[name].detach().contiguous()
        self._touched += info.nbytes
        if info.dtype.isbuiltin == 1:
            array = tensor.numpy()
        else:  # numpy learns this dtype from ml_dtypes, and torch does not know that
            array = tensor.reshape(-1).view(self._torch.uint8).numpy().view(info.dtype).reshape(info.shape)
        array.flags.writeable = False
        return array


def _import_torch(path: Path) -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{path} is a PyTorch file and torch is not installed: pip install eagle_jax[torch], "
            "or use a checkpoint with safetensors"
        ) from None


def _numpy_dtype(path: Path, name: str, tensor: Any) -> np.dtype:
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    for dtype in SAFETENSORS_NAMES:
        if dtype.name == dtype_name:
            return dtype
    raise CheckpointError(
        f"{path}: tensor {name!r} has dtype {dtype_name}, which has no counterpart in numpy"
    )

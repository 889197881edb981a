"""Prepared data on disk: token ids and masks of many samples, ready to be read without being loaded.

A folder holds, for each of the splits `train` and `valid`,

    <split>.tokens    little-endian int32, all samples one after the other
    <split>.mask      a byte, 0 or 1, for each token: whether it is supervised
    <split>.offsets   little-endian int64: where each sample begins, and where the last one ends
    <split>.ids       a line of JSON for each sample: the id of the conversation that it comes from

and `manifest.json`, which says what all this was made from. The manifest is written last, so a folder without one is
one whose making was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from eagle_jax.training.conversations import DataError
from eagle_jax.training.masks import Sample

MANIFEST = "manifest.json"
FORMAT = 1
SPLITS = ("train", "valid")


class DatasetWriter:
    """Writes a prepared folder, a sample at a time. Use it in a `with` block; `finish` makes it whole.

    Raises:
        DataError: the folder holds something already.
    """

    def __init__(self, folder: Path):
        if (folder / MANIFEST).exists():
            raise DataError(f"{folder} holds prepared data already; give another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._files: dict[str, dict[str, IO[bytes]]] = {
            split: {kind: (folder / f"{split}.{kind}").open("wb") for kind in ("tokens", "mask", "ids")}
            for split in SPLITS
        }
        self._offsets = {split: [0] for split in SPLITS}
        self._supervised = dict.fromkeys(SPLITS, 0)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        for files in self._files.values():
            for file in files.values():
                file.close()

    def add(self, split: str, sample: Sample) -> None:
        """Appends a sample."""
        files = self._files[split]
        files["tokens"].write(sample.tokens.astype("<i4").tobytes())
        files["mask"].write(sample.mask.astype(np.uint8).tobytes())
        files["ids"].write(json.dumps(sample.id, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._offsets[split].append(self._offsets[split][-1] + len(sample.tokens))
        self._supervised[split] += int(sample.mask.sum())

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes what is left, and the manifest with `facts` in it, which is returned."""
        for split, files in self._files.items():
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            np.asarray(self._offsets[split], "<i8").tofile(self.folder / f"{split}.offsets")
        manifest = {
            "format": FORMAT,
            **facts,
            "splits": {
                split: {
                    "samples": len(self._offsets[split]) - 1,
                    "tokens": self._offsets[split][-1],
                    "supervised_tokens": self._supervised[split],
                }
                for split in SPLITS
            },
        }
        partial = self.folder / (MANIFEST + ".part")
        with partial.open("w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=1, ensure_ascii=False)
            text.flush()
            os.fsync(text.fileno())
        partial.replace(self.folder / MANIFEST)
        return manifest


@dataclass(frozen=True)
class Dataset:
    """One split of a prepared folder, mapped from disk.

    Attributes:
        manifest: of the folder.
        tokens, mask: of all samples, one after the other.
        offsets: sample i is [offsets[i], offsets[i + 1]).
    """

    manifest: Mapping[str, Any]
    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T] and mask bool [T] of one sample."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = slice(self.offsets[index], self.offsets[index + 1])
        return np.asarray(self.tokens[place]), np.asarray(self.mask[place]).astype(bool)


def open_dataset(folder: Path, split: str) -> Dataset:
    """A split of a prepared folder.

    Raises:
        DataError: the folder is none, is not whole, or is of a later format.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {MANIFEST}: it is no prepared data, or its preparation was interrupted; "
            "run python -m eagle_jax.prepare"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} cannot be read: {error}") from None
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder} is of format {manifest.get('format')}; this version reads {FORMAT}")
    if split not in SPLITS:
        raise DataError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    offsets = np.fromfile(folder / f"{split}.offsets", "<i8")
    total = manifest["splits"][split]["tokens"]
    for kind, width in (("tokens", 4), ("mask", 1)):
        path = folder / f"{split}.{kind}"
        if not path.exists() or path.stat().st_size != total * width:
            raise DataError(f"{path} is damaged: expected {total * width} bytes; prepare the data anew")
    if len(offsets) != manifest["splits"][split]["samples"] + 1 or offsets[-1] != total:
        raise DataError(f"{folder / f'{split}.offsets'} is damaged; prepare the data anew")
    if total == 0:  # an empty file cannot be mapped
        return Dataset(manifest, np.zeros(0, "<i4"), np.zeros(0, np.uint8), offsets)
    return Dataset(
        manifest,
        np.memmap(folder / f"{split}.tokens", "<i4", "r"),
        np.memmap(folder / f"{split}.mask", np.uint8, "r"),
        offsets,
    )

"""Batches for a run: packed rows in an order that a seed and the number of the update decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from eagle_jax.training.conversations import DataError
from eagle_jax.training.dataset import Dataset, open_dataset
from eagle_jax.training.packing import Rows, empty_row
from eagle_jax.training.step import Batch


def open_datasets(folders: Sequence[str], split: str, vocab_size: int) -> list[Dataset]:
    """The same split of several prepared folders.

    Raises:
        DataError: a folder cannot be read, or holds token ids of another vocabulary.
    """
    datasets = [open_dataset(Path(folder), split) for folder in folders]
    for folder, dataset in zip(folders, datasets, strict=True):
        if dataset.manifest["vocab_size"] != vocab_size:
            raise DataError(
                f"{folder} holds token ids of a vocabulary of {dataset.manifest['vocab_size']}, the target's has "
                f"{vocab_size}: prepare the data with this target"
            )
    return datasets


def num_updates(rows: int, batch: int, epochs: int) -> int:
    """Updates that `epochs` passes take; what is left over at the end makes up one more."""
    return -(-rows * epochs // batch)


class Batches:
    """The batches of a run, from any update on.

    Args:
        rows: where they are drawn from.
        passes, size: rows of a batch are `passes` times `size`.
        seed: of the order; each epoch has another one.
        epochs: passes over the rows; None: without end.
        sharding: where batches go.
    """

    def __init__(
        self,
        rows: Rows,
        passes: int,
        size: int,
        seed: int,
        epochs: int | None,
        sharding: NamedSharding,
    ):
        self._shape = (passes, size, rows.length)
        self._sharding = sharding
        dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(epochs)
        self._dataset = dataset.batch(passes * size, drop_remainder=False, batch_fn=list)

    def after(self, step: int) -> Iterator[Batch]:
        """The batches that follow the first `step`; read ahead in threads of their own."""
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        for rows in self._dataset[step:].to_iter_dataset(options):
            yield place(rows, self._shape, self._sharding)


def place(
    rows: Sequence[dict[str, np.ndarray]], shape: tuple[int, int, int], sharding: NamedSharding
) -> Batch:
    """Rows as a batch [A, B, T] on its devices; where they are too few, rows that teach nothing are added.

    On several hosts, each gives its devices what they hold of the whole batch.
    """
    passes, size, length = shape
    short = passes * size - len(rows)

    def array(name: str) -> jax.Array:
        values = [row[name] for row in rows]
        if short:
            values += [empty_row(length)[name]] * short
        stacked = np.stack(values).reshape(passes, size, *values[0].shape)
        return jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])

    return Batch(**{name: array(name) for name in rows[0]})


def held_out(rows: Rows, size: int, sharding: NamedSharding, limit: int | None) -> Iterator[Batch]:
    """All rows once, in batches; at most `limit`."""
    for count, start in enumerate(range(0, len(rows), size)):
        if limit is not None and count >= limit:
            return
        part = [rows[i] for i in range(start, min(start + size, len(rows)))]
        yield place(part, (1, size, rows.length), sharding)


def prompts(datasets: Sequence[Dataset], count: int, longest: int) -> list[list[int]]:
    """What comes before the first answer of `count` samples, evenly spread; prompts over `longest` are left out."""
    found = []
    for dataset in datasets:
        for index in range(len(dataset)):
            tokens, mask = dataset[index]
            begin = int(np.argmax(mask)) if mask.any() else 0
            if 0 < begin <= longest:
                found.append(tokens[:begin].tolist())
    places: Any = np.unique(np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int))
    return [found[i] for i in places]

"""Samples packed into rows of one length.

Which samples share a row is a function of their lengths and a seed, so a run that goes on from a checkpoint sees what
it would have seen. Documents of a row are told apart by their segment; what pads a row is segment 0, and unsupervised.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_jax.training.dataset import Dataset

_WINDOW = 8192  # samples that are packed together


@dataclass(frozen=True)
class Rows:
    """Packed rows of several datasets, made as they are asked for; a Grain data source.

    Attributes:
        datasets: where samples come from; numbered through.
        length: tokens of a row. Longer samples are cut.
        plan: for each row, the samples in it.
    """

    datasets: Sequence[Dataset]
    length: int
    plan: Sequence[Sequence[int]]

    @classmethod
    def of(cls, datasets: Sequence[Dataset], length: int, pack: bool, seed: int) -> Rows:
        """All samples in as few rows as best-fit finds, in an order of its own; without packing, one a row."""
        lengths = np.concatenate([np.diff(d.offsets) for d in datasets])
        order = np.random.default_rng([seed, 1]).permutation(len(lengths))
        if not pack:
            return cls(datasets, length, [[int(i)] for i in order])
        plan: list[list[int]] = []
        for start in range(0, len(order), _WINDOW):
            window = order[start : start + _WINDOW]
            plan += best_fit(window, np.minimum(lengths[window], length), length)
        return cls(datasets, length, plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `segments`, `positions` int32 [T] and `mask` bool [T]; segment 0 is what is left over."""
        T = self.length
        row = empty_row(T)
        begin = 0
        for segment, sample in enumerate(self.plan[index], 1):
            tokens, mask = (part[:T] for part in self.sample(sample))
            place = slice(begin, begin + len(tokens))
            row["tokens"][place], row["mask"][place] = tokens, mask
            row["segments"][place] = segment
            row["positions"][place] = np.arange(len(tokens))
            begin += len(tokens)
        return row

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask of a sample, counted through all datasets."""
        for dataset in self.datasets:
            if index < len(dataset):
                return dataset[index]
            index -= len(dataset)
        raise IndexError(index)

    @property
    def num_cut(self) -> int:
        """Samples that are longer than a row."""
        return int(sum((np.diff(d.offsets) > self.length).sum() for d in self.datasets))


def empty_row(length: int) -> dict[str, np.ndarray]:
    """A row that teaches nothing: what fills up the last batch."""
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "segments", "positions")}
    return row | {"mask": np.zeros(length, bool)}


def best_fit(samples: Sequence[int] | np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of samples whose lengths add up to no more than `capacity`: each, the longest first, goes where it leaves
    the least room (Johnson 1973)."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, which bin), sorted
    for i in np.argsort(-lengths, kind="stable"):
        size = int(lengths[i])
        place = bisect_left(room, (size, -1))
        if place == len(room):
            bins.append([])
            left, which = capacity, len(bins) - 1
        else:
            left, which = room.pop(place)
        bins[which].append(int(samples[i]))
        insort(room, (left - size, which))
    return bins

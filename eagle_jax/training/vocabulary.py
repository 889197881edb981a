"""The draft vocabulary: the tokens that a head can propose."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eagle_jax.training.dataset import Dataset


def draft_vocabulary(
    datasets: Iterable[Dataset], vocab_size: int, size: int, always: Iterable[int] = ()
) -> np.ndarray:
    """The `size` most frequent supervised tokens, ascending, int32 [Vd].

    Where the data holds fewer different ones, the rest are the most frequent of its other tokens, then the lowest ids.

    Args:
        vocab_size: of the target.
        always: tokens that are in it however rare they are, such as those that end an answer.
    """
    supervised, others = (np.zeros(vocab_size, np.int64) for _ in range(2))
    for dataset in datasets:
        for start in range(0, len(dataset.tokens), 2**24):
            tokens = np.asarray(dataset.tokens[start : start + 2**24])
            mask = np.asarray(dataset.mask[start : start + 2**24]).astype(bool)
            supervised += np.bincount(tokens[mask], minlength=vocab_size)
            others += np.bincount(tokens[~mask], minlength=vocab_size)
    first = np.zeros(vocab_size, bool)
    first[list(always)] = True
    order = np.lexsort((np.arange(vocab_size), -others, -supervised, ~first))
    return np.sort(order[:size]).astype(np.int32)

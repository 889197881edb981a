"""Checkpoints of a run, to go on from: the trained parameters, the optimizer, and how far the run has come.

They are Orbax's, written while training goes on. A run that is killed in the middle of a save goes on from the one
before. The last ones are kept, and the best.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from eagle_jax.checkpoints.source import CheckpointError
from eagle_jax.training.step import TrainState

_STATE = "state"


@dataclass(frozen=True)
class Progress:
    """What a run remembers of its evaluations.

    Attributes:
        step: updates made.
        best: the best head's quality so far, larger is better; None: no evaluation yet.
        best_step: where it was.
        since_best: evaluations since then.
    """

    step: int = 0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0

    def after(self, quality: float) -> Progress:
        """With one more evaluation, at this step."""
        if self.best is None or quality > self.best:
            return replace(self, best=quality, best_step=self.step, since_best=0)
        return replace(self, since_best=self.since_best + 1)


class RunCheckpoints:
    """The checkpoints in a folder. Use it in a `with` block, whose end waits for the last save.

    Args:
        folder: is made.
        keep: how many of the latest are kept, beside the best.
    """

    def __init__(self, folder: Path, keep: int):
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["quality"], n=1, keep_checkpoints_without_metrics=False
        )
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            self._checkpointer = ocp.training.Checkpointer(
                folder.absolute(),
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
                cleanup_tmp_directories=True,
            )
        self.folder = folder

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        with _quiet():
            self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """The step of the latest one; None: there is none."""
        found = self._checkpointer.latest
        return None if found is None else int(found.step)

    def save(self, state: TrainState, progress: Progress, quality: float | None = None) -> None:
        """Begins to write a checkpoint; the state may be overwritten as soon as this returns.

        Args:
            quality: what tells the best one; None: it was not evaluated here.
        """
        with _quiet():
            self._checkpointer.save_checkpointables_async(
                progress.step,
                {_STATE: _named(state)},
                metrics=None if quality is None else {"quality": quality},
                custom_metadata=vars(progress),
                overwrite=True,
            )

    def restore(self, abstract: TrainState) -> tuple[TrainState, Progress]:
        """The latest checkpoint, on the shardings of `abstract`, bit for bit.

        Raises:
            CheckpointError: it holds other parameters, or is damaged.
        """
        step = self.latest
        try:
            with _quiet():
                found = self._checkpointer.load_checkpointables(step, {_STATE: _named(abstract)})[_STATE]
                progress = Progress(**self._checkpointer.metadata(step).custom_metadata)
        except (ValueError, OSError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} cannot be gone on from ({reason}); remove its folder to go on "
                "from the one before, or the run's folder to start anew"
            ) from None
        leaves = [found[name] for name in _named(abstract)]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), progress


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds Orbax's log to errors: it tells of its own inner workings."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

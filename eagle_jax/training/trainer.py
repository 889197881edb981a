"""A run: updates, evaluations, checkpoints, and what is written down, until it ends, is stopped, or gets no better.

A run's folder holds

    run.json       the config, and what the data and the target were
    checkpoints/   to go on from
    metrics.jsonl  a line for each figure of training and evaluation; curves.png; tensorboard/
    best/, last/   heads, in this library's own format: `eagle_jax.infer` reads them, `eagle_jax.convert` exports them
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from eagle_jax.checkpoints.resolve import open_source, resolve_checkpoint
from eagle_jax.errors import ConfigError
from eagle_jax.loading import load_target
from eagle_jax.parallel.mesh import MeshShape, check_mesh, make_mesh
from eagle_jax.progress import loading_bar
from eagle_jax.training.checkpoints import Progress, RunCheckpoints
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import Batches, held_out, num_updates, open_datasets, prompts
from eagle_jax.training.evaluation import AcceptanceMeter, metrics_of
from eagle_jax.training.heads import prepare_head
from eagle_jax.training.initialise import Calibration
from eagle_jax.training.losses import Objective, supervised
from eagle_jax.training.metrics import MetricLog
from eagle_jax.training.optimizer import learning_rate, make_optimizer
from eagle_jax.training.packing import Rows
from eagle_jax.training.step import (
    Fixed,
    Metrics,
    Training,
    TrainState,
    batch_sharding,
    state_shardings,
)
from eagle_jax.training.teacher import teach

RUN = "run.json"
CALIBRATION_SLOTS = 32768  # that a linear start is fitted on
# Keys that may change between a run's parts: they decide what is written down, not what is learned.
_FREE = ("checkpoints", "logging", "compilation_cache", "output")


@dataclass(frozen=True)
class Outcome:
    """How a run, or its part, ended.

    Attributes:
        step: updates made.
        quality: of the best head: its mean acceptance length, or else minus its loss; None: never evaluated.
        signal: the signal that stopped it; None: it ran to its end.
        stopped_early: it ended because it got no better.
    """

    step: int
    quality: float | None
    signal: int | None = None
    stopped_early: bool = False


class Trainer:
    """Everything that a run needs, loaded.

    Raises:
        EagleError: a model, data or shapes that do not go together; nothing has been written then.
    """

    def __init__(self, config: TrainConfig, console: Console):
        self.config, self.console = config, console
        self.folder = Path(config.output)
        if config.compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
        path = resolve_checkpoint(config.model)
        hf_config = open_source(path).config
        shape = MeshShape(**config.mesh.model_dump())
        self.mesh = make_mesh(shape)
        with loading_bar(True, "Loading the target") as report:
            self.loaded = load_target(path, config.dtype, self.mesh, report)
        model = self.loaded.target.config
        check_mesh(shape, model, config.batch.rows)
        length = config.batch.length
        if length > model.context_length:
            raise ConfigError(
                f"batch.length {length} is beyond the target's context of {model.context_length}"
            )
        self.sharding = batch_sharding(self.mesh)
        self.datasets = open_datasets(config.data, "train", model.vocab_size)
        self.valid = open_datasets(config.data, "valid", model.vocab_size)
        self.rows = Rows.of(self.datasets, length, config.batch.pack, config.seed)
        self.valid_rows = Rows.of(self.valid, length, config.batch.pack, config.seed)
        if not len(self.rows):
            raise ConfigError(f"data: there is nothing to learn from in {', '.join(config.data)}")
        size = config.batch.rows * config.batch.accumulate
        self.steps = config.steps or num_updates(len(self.rows), size, config.epochs)

        self.head = prepare_head(
            config.head, self.loaded, hf_config, self.datasets, self._calibrate, config.seed
        )
        check_mesh(shape, self.head.config.model, config.batch.rows, "the head")
        objective = config.objective
        self.objective = Objective(
            objective.loss,
            objective.step_decay,
            objective.lk_decay,
            objective.mask_alignment,
            objective.denominator,
        )
        self.training = Training(
            self.loaded.target,
            self.head.functional,
            self.head.config,
            self.objective,
            config.head.method,
            config.dtype,
            config.remat,
            objective.regression_weight,
            objective.distillation_weight,
            objective.feature_noise,
            config.seed,
        )
        self.optimizer = make_optimizer(config.optimizer, self.steps)
        self.rate = learning_rate(config.optimizer, self.steps)
        self.abstract, self.placed = state_shardings(self.training, self.optimizer, self.mesh)
        frozen = {name: jax.device_put(value) for name, value in self.head.frozen.items()}
        self.fixed = Fixed(self.loaded.params, frozen)
        self._train_steps: dict[int, Callable[..., tuple[TrainState, Metrics]]] = {}
        self._eval_step = jax.jit(partial(self.training.eval_step, self.final_length))
        self.meter = self._meter()

    # ---------------------------------------------------------------- parts

    @property
    def final_length(self) -> int:
        """Steps of the training-time test at the end of the run, which evaluations take."""
        return list(self.config.objective.length.values())[-1]

    def length_at(self, step: int) -> int:
        """Steps of the training-time test in the update after `step`."""
        return [length for start, length in self.config.objective.length.items() if start <= step][-1]

    def train_step(self, length: int) -> Callable[..., tuple[TrainState, Metrics]]:
        """The jitted update with so many steps of the training-time test."""
        if length not in self._train_steps:
            step = partial(self.training.train_step, self.optimizer, length)
            self._train_steps[length] = jax.jit(step, donate_argnums=0, out_shardings=(self.placed, None))
        return self._train_steps[length]

    def _calibrate(self, taps: tuple[int, ...]) -> Calibration:
        """The target's states at supervised slots of the first rows."""
        target, params, batch = self.loaded.target, self.loaded.params, self.config.batch
        states = jax.jit(partial(teach, target, taps=taps))
        embeddings = params["embed_tokens.weight"]
        parts: list[tuple[np.ndarray, ...]] = []
        slots = 0
        for part in held_out(self.rows, batch.rows, self.sharding, None):
            tokens, segments, positions = part.tokens[0], part.segments[0], part.positions[0]
            tapped, hidden = jax.device_get(states(params, tokens, segments, positions))
            counts = supervised(part.mask[0], segments, 1, Objective())[0]
            # A document's first token has states unlike all others.
            row, slot = np.nonzero(np.asarray(counts & (positions > 0)))
            after = np.asarray(tokens)[row, slot + 1]
            parts.append(
                (tapped[row, slot], hidden[row, slot], hidden[row, slot + 1], np.asarray(embeddings[after]))
            )
            slots += len(row)
            if slots >= CALIBRATION_SLOTS:
                break
        if not slots:
            raise ConfigError("data: no two supervised tokens follow each other; there is nothing to learn")
        return Calibration(*(np.concatenate(x) for x in zip(*parts, strict=True)))

    def _meter(self) -> AcceptanceMeter | None:
        evaluation = self.config.evaluation
        longest = min(
            self.config.batch.length, self.loaded.target.config.context_length - evaluation.max_new_tokens
        )
        found = prompts(self.valid, evaluation.prompts, longest)
        return AcceptanceMeter(evaluation, self.loaded, self.head, self.mesh, found) if found else None

    def initial_state(self) -> TrainState:
        """The state before the first update."""
        place = jax.jit(
            lambda params: TrainState(jnp.int32(0), params, self.optimizer.init(params)),
            out_shardings=self.placed,
        )
        return place({name: np.asarray(value, np.float32) for name, value in self.head.trained.items()})

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Figures on the held-out data; see `metrics_of`. Empty where none was held out."""
        figures: dict[str, float] = {}
        batch = self.config.batch
        sums: Any = None
        tokens = 0
        for part in held_out(self.valid_rows, batch.rows, self.sharding, self.config.evaluation.batches):
            one = self._eval_step(state.params, self.fixed, part)
            sums = one if sums is None else jax.tree.map(jnp.add, sums, one)
            tokens += batch.rows * batch.length
        if sums is not None:
            counted, distance = sums
            figures = metrics_of(counted, distance, float(tokens), self.objective)
        if self.meter is not None:
            figures["measured_acceptance_length"] = self.meter.measure(state.params)
        return figures

    # ---------------------------------------------------------------- the run

    def run(self) -> Outcome:
        """Trains from where the folder's last checkpoint stands to the end, or to a signal.

        Raises:
            ConfigError: the folder holds another run.
        """
        self._claim_folder()
        with (
            RunCheckpoints(self.folder / "checkpoints", self.config.checkpoints.keep) as checkpoints,
            _signals() as caught,
        ):
            if checkpoints.latest is None:
                state, progress = self.initial_state(), Progress()
            else:
                abstract = jax.tree.map(
                    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                    self.abstract,
                    self.placed,
                )
                state, progress = checkpoints.restore(abstract)
                self.console.print(f"going on after update {progress.step}")
            facts = json.loads((self.folder / RUN).read_text(encoding="utf-8"))
            with (
                MetricLog(self.folder, self.config.logging, self.folder.name, facts, progress.step) as log,
                self._bar() as bar,
            ):
                return self._updates(state, progress, checkpoints, log, bar, caught)

    def _updates(
        self,
        state: TrainState,
        progress: Progress,
        checkpoints: RunCheckpoints,
        log: MetricLog,
        bar: Callable[..., None],
        caught: list[int],
    ) -> Outcome:
        config = self.config
        batches = self._batches().after(progress.step)
        window: list[Metrics] = []
        began = time.perf_counter()
        while progress.step < self.steps:
            batch = next(batches)
            state, metrics = self.train_step(self.length_at(progress.step))(state, self.fixed, batch)
            progress = replace(progress, step=progress.step + 1)
            window.append(metrics)
            last = progress.step == self.steps
            if progress.step % config.logging.every == 0 or last or self._changes_length(progress.step):
                figures = self._figures(window, progress.step, began)
                log.write(progress.step, figures, "train")
                bar(progress, figures)
                window, began = [], time.perf_counter()
            saved = False
            if progress.step % config.evaluation.every == 0 or last:
                figures = self.evaluate(state)
                if figures:
                    quality = figures.get("measured_acceptance_length", -figures.get("loss", np.inf))
                    progress = progress.after(quality)
                    log.write(progress.step, figures, "valid")
                    log.plot()
                    self._report(progress, figures)
                    if progress.best_step == progress.step:
                        self.head.save(self.folder / "best", state.params)
                        checkpoints.save(state, progress, quality)
                        saved = True
                began = time.perf_counter()
            patience = config.evaluation.patience
            over = patience is not None and progress.since_best >= patience
            if not saved and (progress.step % config.checkpoints.every == 0 or last or over or caught):
                checkpoints.save(state, progress)
            if caught and not last:
                return Outcome(progress.step, progress.best, signal=caught[0])
            if over:
                break
        self.head.save(self.folder / "last", state.params)
        log.plot()
        return Outcome(progress.step, progress.best, stopped_early=progress.step < self.steps)

    def _batches(self) -> Batches:
        config = self.config
        epochs = None if config.steps is not None else config.epochs
        return Batches(
            self.rows, config.batch.accumulate, config.batch.rows, config.seed, epochs, self.sharding
        )

    def _changes_length(self, step: int) -> bool:
        return self.length_at(step) != self.length_at(step - 1)

    def _figures(self, window: list[Metrics], step: int, began: float) -> dict[str, float]:
        window = jax.device_get(window)
        batch = self.config.batch
        tokens = batch.rows * batch.accumulate * batch.length
        seconds = time.perf_counter() - began
        sums, regression = jax.tree.map(
            lambda *leaves: sum(leaves), *[(metrics.sums, metrics.regression) for metrics in window]
        )
        figures = metrics_of(sums, regression, float(tokens * len(window)), self.objective)
        return figures | {
            "loss": float(np.mean([metrics.loss for metrics in window])),
            "gradient_norm": float(np.mean([metrics.gradient_norm for metrics in window])),
            "learning_rate": float(self.rate(step - 1)),
            "tokens_per_second": tokens * len(window) / seconds,
        }

    def _claim_folder(self) -> None:
        """Writes down what the run is, or checks that it is the one that the folder holds."""
        facts = {
            "config": self.config.model_dump(mode="json"),
            "data": [dict(d.manifest) for d in self.datasets],
            "steps": self.steps,
            "head": self.head.hf_config,
        }
        facts = json.loads(json.dumps(facts))
        path = self.folder / RUN
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            changed = [
                f"{key}: {json.dumps(found['config'].get(key))} there, {json.dumps(value)} here"
                for key, value in facts["config"].items()
                if key not in _FREE and found["config"].get(key) != value
            ]
            changed += [name for name in ("data", "steps") if found.get(name) != facts[name] and not changed]
            if changed:
                raise ConfigError(
                    f"output {self.folder} holds a run of another config ({'; '.join(changed)}); give another output, "
                    "or remove that one"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"output {self.folder} is not empty and holds no run; give another folder")
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial_path = path.with_suffix(".part")
            partial_path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
            partial_path.replace(path)

    def _report(self, progress: Progress, figures: dict[str, float]) -> None:
        accuracies = " ".join(f"{v:.3f}" for k, v in figures.items() if k.startswith("accuracy_"))
        facts = [f"update {progress.step}", f"loss {figures['loss']:.4f}", f"accuracy {accuracies}"]
        if (measured := figures.get("measured_acceptance_length")) is not None:
            facts.append(f"τ {measured:.3f}")
        if progress.best_step == progress.step:
            facts.append("best")
        self.console.print(" · ".join(facts), highlight=False)

    @contextmanager
    def _bar(self) -> Iterator[Callable[..., None]]:
        """A progress bar where there is a terminal, else a line now and then."""
        if not self.console.is_terminal:

            def line(progress: Progress, figures: dict[str, float]) -> None:
                self.console.print(
                    f"update {progress.step} of {self.steps} · loss {figures['loss']:.4f} · accuracy "
                    f"{figures['accuracy_0']:.3f} · {figures['tokens_per_second']:.0f} tokens/s",
                    highlight=False,
                )

            yield line
            return
        columns = (
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        with Bar(*columns, console=self.console) as bar:
            task = bar.add_task("", total=self.steps, facts="compiling")

            def update(progress: Progress, figures: dict[str, float]) -> None:
                facts = (
                    f"loss {figures['loss']:.3f} · accuracy {figures['accuracy_0']:.3f} · "
                    f"{figures['tokens_per_second']:.0f} tokens/s"
                )
                bar.update(task, completed=progress.step, facts=facts)

            yield update


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of them; a second one kills as always."""
    caught: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)

"""What is written down about a run: figures as JSON lines, curves, and TensorBoard, Weights & Biases or MLflow.

`metrics.jsonl` is the record: it is cut to the checkpoint that a run goes on from, and the run ends if it cannot be
written. The rest shows the same figures elsewhere; what fails in mid-run is given up with a warning.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, Self

import jax
from pydantic import Field

from eagle_jax.errors import ConfigError
from eagle_jax.schema import Bool, PositiveInt, Section, Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS, CURVES, TENSORBOARD = "metrics.jsonl", "curves.png", "tensorboard"
TRACKERS = "trackers.json"  # the ids of this run in W&B and MLflow
Row = dict[str, Any]


class LoggingConfig(Section):
    """What is written down besides metrics.jsonl and curves.png, and how often."""

    every: PositiveInt = Field(default=10, description="Updates between two lines of training metrics.")
    tensorboard: Bool = Field(default=True, description="Write tensorboard/ in the run's folder.")
    wandb: Text | None = Field(
        default=None, description="A project of Weights & Biases to log to (pip install wandb). null: none."
    )
    mlflow: Text | None = Field(
        default=None,
        description="An experiment of MLflow to log to, where MLFLOW_TRACKING_URI says (pip install mlflow). "
        "null: none.",
    )


class MetricLog:
    """The figures of a run, as a context manager. Of several processes the first writes; the others do nothing.

    Args:
        folder: the run's folder.
        run_name: what W&B and MLflow call the run.
        facts: the config and whatever else describes the run, for W&B and MLflow.
        step: the update that the run goes on from. Later rows are cut, and hidden in TensorBoard; W&B and MLflow go on
            with the run that they had and keep what it has. 0: everything begins anew.

    Raises:
        ConfigError: a library is missing, W&B or MLflow does not start, or metrics.jsonl is broken.
    """

    def __init__(self, folder: Path, config: LoggingConfig, run_name: str, facts: dict[str, Any], step: int):
        self._folder = folder
        self._file: BinaryIO | None = None
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()
        if jax.process_index() != 0:
            return
        # Found out now, not when the first curves are drawn.
        _library("matplotlib.figure", f"{CURVES} needs matplotlib: pip install 'eagle-jax[train]'")
        try:
            if config.wandb is not None:
                self._start("logging.wandb", WandB, config.wandb, run_name, facts, step > 0)
            if config.mlflow is not None:
                self._start("logging.mlflow", MLflow, config.mlflow, run_name, facts, step > 0)
            if config.tensorboard:
                self._sinks["logging.tensorboard"] = TensorBoard(folder / TENSORBOARD, step)
            rows = [row for row in _read(folder / METRICS) if row["step"] <= step] if step else []
            _replace(folder / METRICS, b"".join(map(_line, rows)))
            self._file = (folder / METRICS).open("ab")
        except BaseException:
            self.close(failed=True)
            raise

    def write(self, step: int, values: Mapping[str, float], kind: Literal["train", "valid"]) -> None:
        """Appends a row. It is in the file on return; NaN and infinities are null there."""
        if self._file is None:
            return
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._file.write(_line({"step": step, "kind": kind, "time": now, **finite}))
        self._file.flush()
        tagged = {f"{kind}/{name}": float(value) for name, value in values.items()}
        for key, sink in self._sinks.items():
            if key not in self._failed:
                self._attempt(key, sink.write, step, tagged)

    def rows(self) -> list[Row]:
        """All rows so far."""
        return [] if self._file is None else _read(self._folder / METRICS)

    def plot(self) -> None:
        """Draws curves.png anew, if there are rows."""
        if (rows := self.rows()) and CURVES not in self._failed:
            self._attempt(CURVES, _draw_file, rows, self._folder / CURVES)

    def close(self, failed: bool = False) -> None:
        """Ends the log; `failed` tells W&B and MLflow that the run ended by an error."""
        for key, sink in self._sinks.items():
            self._attempt(key, sink.close, failed)
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def _start(self, key: str, tracker: type[WandB | MLflow], *args: Any) -> None:
        try:
            self._sinks[key] = tracker(self._folder, *args)
        except ConfigError:
            raise
        except Exception as error:  # each library has its own
            raise ConfigError(
                f"{key} does not start: {error}; mend that, set it to null, or remove {self._folder / TRACKERS} to "
                "begin another run there"
            ) from error

    def _attempt(self, key: str, action: Callable[..., None], *args: Any) -> None:
        """A run must not die of a tracker, nor wait for one again and again: their libraries retry for minutes."""
        try:
            action(*args)
        except Exception as error:  # each library has its own
            if key not in self._failed:
                warnings.warn(
                    f"{key} fails and is given up until the run is started again, but {METRICS} goes on: {error!r}",
                    stacklevel=3,
                )
            self._failed.add(key)


class Sink(Protocol):
    """Where figures go besides metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the figures of one row, named by tags such as `train/loss`."""

    def close(self, failed: bool) -> None:
        """Ends the run there."""


class TensorBoard:
    """Event files. Written without tensorboardX's `SummaryWriter`, whose thread hides errors and then blocks."""

    def __init__(self, folder: Path, step: int):
        needs = "logging.tensorboard needs tensorboardX: pip install 'eagle-jax[train]', or set it to false"
        writer = _library("tensorboardX.event_file_writer", needs)
        self._events = _library("tensorboardX.proto.event_pb2", needs)
        self._summaries = _library("tensorboardX.proto.summary_pb2", needs)
        folder.mkdir(exist_ok=True)
        # A file's name has seconds in it; the step keeps one that is gone on from within a second.
        self._writer = writer.EventsWriter(str(folder / "events"), f".{step:09d}")
        # Hides what earlier files hold from that step on.
        self._event(step=step + 1, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event with all figures."""
        scalars = [
            self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()
        ]
        self._event(step=step, summary=self._summaries.Summary(value=scalars))

    def close(self, failed: bool) -> None:
        """Closes the file; TensorBoard does not know of failures."""
        self._writer.close()

    def _event(self, **fields: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), **fields))
        self._writer.flush()


class WandB:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, project: str, run_name: str, facts: dict[str, Any], resumed: bool):
        wandb = _library("wandb", "logging.wandb needs wandb: pip install wandb")
        key = f"wandb/{project}"
        run_id = (_ids(folder).get(key) if resumed else None) or uuid.uuid4().hex
        where = dict(project=project, name=run_name, id=run_id, resume="allow", dir=str(folder))
        self._run = wandb.init(**where, config=facts, allow_val_change=True)
        _remember(folder, key, run_id)
        # W&B's own steps cannot go back, as they do when a run goes on from a checkpoint.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One entry of the run's history."""
        self._run.log({"update": step, **values})

    def close(self, failed: bool) -> None:
        """Waits until everything is sent."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow."""

    def __init__(self, folder: Path, experiment: str, run_name: str, facts: dict[str, Any], resumed: bool):
        self._mlflow = _library("mlflow", "logging.mlflow needs mlflow: pip install mlflow")
        key = f"mlflow/{experiment}"
        known = _ids(folder).get(key) if resumed else None
        self._mlflow.set_experiment(experiment)
        run = self._mlflow.start_run(run_id=known, run_name=run_name)
        _remember(folder, key, run.info.run_id)
        if known is None:  # a parameter of a run cannot change
            self._mlflow.log_params(_flat(facts))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The run's metrics."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Ends the run as FINISHED or FAILED."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def draw(rows: Sequence[Row]) -> Figure:
    """The curves of a run: losses, accuracies, acceptance lengths and learning rate, over updates."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    keys = dict.fromkeys(key for row in rows for key in row)
    steps = [key for key in keys if key.startswith("accuracy_")]
    shades = matplotlib.colormaps["viridis"]([0.9 * i / max(len(steps) - 1, 1) for i in range(len(steps))])
    lengths = {f"{kind}_acceptance_length": kind for kind in ("measured", "simulated")}
    panels: dict[str, dict[str, tuple[str, Any]]] = {
        "loss": {"loss": ("loss", "C0")},
        "accuracy": {key: (key.replace("accuracy_", "step "), shades[i]) for i, key in enumerate(steps)},
        "acceptance length": {key: (kind, f"C{i + 1}") for i, (key, kind) in enumerate(lengths.items())},
        "learning rate": {"learning_rate": ("learning rate", "C3")},
    }
    looks: dict[str, dict[str, Any]] = {"train": dict(alpha=0.35), "valid": dict(marker=".")}
    kinds = [kind for kind in looks if any(row["kind"] == kind for row in rows)]
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, (name, series) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        handles = []
        for key, (label, colour) in series.items():
            for kind in kinds:
                points = [(row["step"], row[key]) for row in rows if row["kind"] == kind and key in row]
                if points:
                    x, y = zip(*((step, math.nan if v is None else v) for step, v in points), strict=True)
                    alone = {"marker": "."} if len(x) == 1 else {}  # one point has no line
                    axes.plot(x, y, color=colour, label=f"{label}, {kind}", **alone | looks[kind])
            if key in keys:
                handles.append(Line2D([], [], color=colour, label=label))
        axes.set(xlabel="update", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.ticklabel_format(axis="y", scilimits=(-3, 4))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(handles) > 1:
            axes.legend(handles=handles, fontsize="small", ncols=2)
    handles = [Line2D([], [], color="black", label=kind, **looks[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_file(rows: Sequence[Row], path: Path) -> None:
    image = io.BytesIO()
    draw(rows).savefig(image, format="png", dpi=120)
    _replace(path, image.getvalue())


def _library(module: str, needs: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{needs} ({error})") from None


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _read(path: Path) -> list[Row]:
    """A file's rows. The last line may be half-written, by a run that was killed, and is then left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: {error}; remove that line") from None
    return rows


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


def _ids(folder: Path) -> dict[str, str]:
    path = folder / TRACKERS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _remember(folder: Path, key: str, run_id: str) -> None:
    _replace(folder / TRACKERS, json.dumps({**_ids(folder), key: run_id}).encode())


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat

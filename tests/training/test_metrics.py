"""What is written down about a run: that it survives kills and resumes, and that trackers get it but cannot stop it."""

import json
import math
import re
import struct
import sys
import warnings
from datetime import datetime, timedelta
from types import SimpleNamespace

import jax
import pytest
from PIL import Image

from eagle_jax.errors import ConfigError
from eagle_jax.training.metrics import LoggingConfig, MetricLog, draw

QUIET = LoggingConfig(tensorboard=False)
FACTS = {"config": {"optimizer": {"learning_rate": 1e-4}, "data": ["a", "b"]}, "steps": 100}


def open_log(folder, config=QUIET, step=0):
    return MetricLog(folder, config, "my-run", FACTS, step)


def steps(log):
    return [row["step"] for row in log.rows()]


# ---------------------------------------------------------------- metrics.jsonl


def test_a_row_is_a_line_and_is_there_at_once(tmp_path):
    with open_log(tmp_path) as log:
        log.write(10, {"loss": 2.5, "accuracy_0": 0.5}, "train")
        log.write(10, {"loss": 3}, "valid")
        first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        assert log.rows() == [first, second]
    time = datetime.fromisoformat(first.pop("time"))
    assert time.utcoffset() == timedelta(0)
    assert first == {"step": 10, "kind": "train", "loss": 2.5, "accuracy_0": 0.5}
    assert second["kind"] == "valid"


def test_what_is_not_finite_is_null(tmp_path):
    with open_log(tmp_path) as log:
        log.write(1, {"loss": math.nan, "gradient_norm": math.inf, "accuracy_0": 0.0}, "train")
        (row,) = log.rows()
    assert (row["loss"], row["gradient_norm"], row["accuracy_0"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 20, "kin', b"\0\0\0\0", b'{"step": 20, "kind": "valid", "lo\xff']
)
def test_a_resumed_run_is_cut_to_its_step(tmp_path, tail):
    with open_log(tmp_path) as log:
        for step in (10, 20, 30):
            log.write(step, {"loss": 1 / step}, "train")
            log.write(step, {"loss": 2 / step}, "valid")
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + tail)
    with open_log(tmp_path, step=20) as log:
        assert path.read_bytes() == b"".join(before[:4])
        log.write(25, {"loss": 1.0}, "train")
        assert steps(log) == [10, 10, 20, 20, 25]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "kind": "train"}')
    with open_log(tmp_path, step=10) as log:
        log.write(20, {}, "train")
        assert steps(log) == [10, 20]


def test_a_new_run_starts_empty(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "kind": "train"}\n')
    with open_log(tmp_path) as log:
        assert log.rows() == []


def test_a_resumed_run_without_a_file_starts_empty(tmp_path):
    with open_log(tmp_path, step=10) as log:
        assert log.rows() == []


def test_a_broken_line_in_the_middle_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"st\n{"step": 30}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: .*remove that line"):
        open_log(tmp_path, step=30)


def test_a_full_disk_ends_the_run(tmp_path):
    log = open_log(tmp_path)
    log._file.close()
    log._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"), log:
        log.write(1, {"loss": 1.0}, "train")


def test_other_processes_do_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_log(tmp_path, LoggingConfig(wandb="heads")) as log:
        log.write(1, {"loss": 1.0}, "train")
        log.plot()
        assert log.rows() == []
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- curves.png

ROWS = [
    *(
        {"step": s, "kind": "train", "loss": 9 / s, "accuracy_0": s / 100, "learning_rate": 1e-4}
        for s in (10, 20, 30)
    ),
    {"step": 20, "kind": "train", "loss": None, "accuracy_0": 0.2, "accuracy_1": 0.1},
    {"step": 20, "kind": "valid", "loss": 2.0, "accuracy_0": 0.3, "simulated_acceptance_length": 1.5},
    {"step": 30, "kind": "valid", "loss": 1.0, "accuracy_0": 0.4, "measured_acceptance_length": 2.5},
]


def panels(rows):
    figure = draw(rows)
    for axes in figure.axes:
        assert axes.get_xlabel() == "update"
    return figure, {
        axes.get_ylabel(): {line.get_label(): line for line in axes.lines} for axes in figure.axes
    }


def legend(owner):
    return [text.get_text() for text in owner.get_texts()]


def test_the_curves():
    figure, curves = panels(ROWS)
    assert {name: set(lines) for name, lines in curves.items()} == {
        "loss": {"loss, train", "loss, valid"},
        "accuracy": {"step 0, train", "step 0, valid", "step 1, train"},
        "acceptance length": {"measured, valid", "simulated, valid"},
        "learning rate": {"learning rate, train"},
    }
    loss = curves["loss"]["loss, train"]
    assert list(loss.get_xdata()) == [10, 20, 30, 20]
    assert list(loss.get_ydata())[:3] == [0.9, 0.45, 0.3]
    assert math.isnan(loss.get_ydata()[3])
    assert list(curves["loss"]["loss, valid"].get_ydata()) == [2.0, 1.0]
    faint, solid = (curves["accuracy"][f"step 0, {kind}"] for kind in ("train", "valid"))
    assert faint.get_alpha() < 0.5
    assert solid.get_alpha() is None
    assert (
        tuple(faint.get_color())
        == tuple(solid.get_color())
        != tuple(curves["accuracy"]["step 1, train"].get_color())
    )
    # One point is no line.
    assert curves["acceptance length"]["measured, valid"].get_marker() == "."
    assert curves["accuracy"]["step 1, train"].get_marker() == "."
    assert legend(figure.legends[0]) == ["train", "valid"]
    assert legend(figure.axes[1].get_legend()) == ["step 0", "step 1"]
    assert legend(figure.axes[2].get_legend()) == ["measured", "simulated"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "kind": "train", "loss": 1.0}],
        [{"step": 1, "kind": "valid", "loss": None}],
        [{"step": 1, "kind": "train"}],
        [{"step": s, "kind": "train", "loss": None, "learning_rate": 0.0} for s in (1, 2)],
        ROWS,
    ],
    ids=["one", "nan", "nothing", "nans", "some"],
)
def test_the_image(tmp_path, rows):
    with open_log(tmp_path) as log:
        for row in rows:
            figures = {k: math.nan if v is None else v for k, v in row.items() if k not in ("step", "kind")}
            log.write(row["step"], figures, row["kind"])
        log.plot()
    with Image.open(tmp_path / "curves.png") as png:
        png.load()
        assert png.format == "PNG"
        assert png.width > png.height > 600
        colours = png.convert("RGB").getcolors(1 << 20)
    assert len(colours) > 50  # text and lines, not an empty page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_no_rows_no_image(tmp_path):
    with open_log(tmp_path) as log:
        log.plot()
    assert not (tmp_path / "curves.png").exists()
    draw([])


def test_a_failing_image_is_told_once(tmp_path):
    (tmp_path / "curves.png").mkdir()
    with open_log(tmp_path) as log:
        log.write(1, {"loss": 1.0}, "train")
        with pytest.warns(UserWarning, match=r"curves\.png fails"):
            log.plot()
        log.plot()


# ---------------------------------------------------------------- TensorBoard


def events(folder):
    """All events, in the order in which TensorBoard reads them: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def shown(folder):
    """What TensorBoard shows: a start at a step takes back all that came before with that step or a later one."""
    from tensorboardX.proto.event_pb2 import SessionLog

    points = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            points = [point for point in points if point[1] < event.step]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def test_tensorboard_shows_the_figures(tmp_path):
    with open_log(tmp_path, LoggingConfig()) as log:
        log.write(10, {"loss": 2.5, "accuracy_0": 0.5}, "train")
        log.write(10, {"loss": 3.5}, "valid")
        expected = [("train/loss", 10, 2.5), ("train/accuracy_0", 10, 0.5), ("valid/loss", 10, 3.5)]
        assert shown(tmp_path / "tensorboard") == expected  # not only after close
    first = next(events(tmp_path / "tensorboard"))
    assert first.file_version == "brain.Event:2"
    assert first.wall_time > 1.7e9


@pytest.mark.parametrize(("step", "left"), [(20, [10, 20]), (0, [])])
def test_tensorboard_hides_what_is_done_again(tmp_path, step, left):
    with open_log(tmp_path, LoggingConfig()) as log:
        for s in (10, 20, 21, 30):
            log.write(s, {"loss": 1.0}, "train")
    with open_log(tmp_path, LoggingConfig(), step) as log:
        assert [s for _, s, _ in shown(tmp_path / "tensorboard")] == left
        log.write(step + 1, {"loss": 2.0}, "train")
    assert [s for _, s, _ in shown(tmp_path / "tensorboard")] == [*left, step + 1]


# ---------------------------------------------------------------- W&B and MLflow


class FakeWandB:
    """The part of W&B that is used; `fails` is raised by what is sent."""

    def __init__(self):
        self.inits, self.logged, self.metrics, self.finished, self.fails = [], [], [], [], None

    def init(self, **settings):
        self.inits.append(settings)
        return SimpleNamespace(log=self._log, define_metric=self._define, finish=self._finish)

    def _define(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def _log(self, values):
        if self.fails:
            raise self.fails
        self.logged.append(values)

    def _finish(self, exit_code):
        self.finished.append(exit_code)


class FakeMLflow:
    """The part of MLflow that is used."""

    def __init__(self):
        self.experiments, self.runs, self.params, self.logged, self.ended, self.fails = (
            [],
            [],
            [],
            [],
            [],
            None,
        )

    def set_experiment(self, name):
        self.experiments.append(name)

    def start_run(self, run_id, run_name):
        self.runs.append((run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"id-{len(self.runs)}"))

    def log_params(self, params):
        self.params.append(params)

    def log_metrics(self, values, step):
        if self.fails:
            raise self.fails
        self.logged.append((step, values))

    def end_run(self, status):
        self.ended.append(status)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


WANDB, MLFLOW = QUIET.model_copy(update={"wandb": "heads"}), QUIET.model_copy(update={"mlflow": "heads"})


def test_wandb_goes_on_with_its_run(tmp_path, wandb):
    with open_log(tmp_path, WANDB) as log:
        log.write(10, {"loss": 1.5}, "train")
    with open_log(tmp_path, WANDB, step=10) as log:
        log.write(20, {"loss": 0.5}, "valid")
    open_log(tmp_path, WANDB.model_copy(update={"wandb": "others"}), step=20).close()
    open_log(tmp_path, WANDB, step=20).close()
    open_log(tmp_path, WANDB).close()  # from 0: another run
    first, again, other, back, anew = [settings["id"] for settings in wandb.inits]
    assert first == again == back
    assert len({first, other, anew}) == 3
    settings = wandb.inits[1]
    assert (settings["project"], settings["name"], settings["resume"]) == ("heads", "my-run", "allow")
    assert (settings["config"], settings["allow_val_change"]) == (FACTS, True)
    assert settings["dir"] == str(tmp_path)
    assert wandb.logged == [{"update": 10, "train/loss": 1.5}, {"update": 20, "valid/loss": 0.5}]
    assert wandb.metrics[:2] == [("update", None), ("*", "update")]
    assert wandb.finished == [0] * 5


def test_mlflow_goes_on_with_its_run(tmp_path, mlflow):
    with open_log(tmp_path, MLFLOW) as log:
        log.write(10, {"loss": 1.5}, "train")
    with open_log(tmp_path, MLFLOW, step=10) as log:
        log.write(20, {"loss": 0.5}, "valid")
    open_log(tmp_path, MLFLOW).close()
    assert mlflow.experiments == ["heads"] * 3
    assert mlflow.runs == [(None, "my-run"), ("id-1", "my-run"), (None, "my-run")]
    # Parameters of a run cannot change: they are logged with new ones only.
    assert (
        mlflow.params
        == [
            {"config.optimizer.learning_rate": 1e-4, "config.data": ["a", "b"], "steps": 100},
        ]
        * 2
    )
    assert mlflow.logged == [(10, {"train/loss": 1.5}), (20, {"valid/loss": 0.5})]
    assert mlflow.ended == ["FINISHED"] * 3


def test_trackers_are_told_that_a_run_failed(tmp_path, wandb, mlflow):
    with pytest.raises(ZeroDivisionError), open_log(tmp_path, WANDB.model_copy(update={"mlflow": "heads"})):
        raise ZeroDivisionError
    assert (wandb.finished, mlflow.ended) == ([1], ["FAILED"])


def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tmp_path, wandb, mlflow):
    wandb.fails = ConnectionError("no route")
    with open_log(tmp_path, LoggingConfig(wandb="heads", mlflow="heads")) as log:
        with pytest.warns(UserWarning, match=r"logging\.wandb fails .*no route"):
            log.write(1, {"loss": 1.0}, "train")
        wandb.fails = None
        log.write(2, {"loss": 1.0}, "train")  # a warning would be an error here
        assert steps(log) == [1, 2]
    assert wandb.logged == []
    assert [step for step, _ in mlflow.logged] == [1, 2]
    assert len(shown(tmp_path / "tensorboard")) == 2
    assert wandb.finished == [0]


def test_tensorboard_that_fails_stops_nothing(tmp_path):
    with open_log(tmp_path, LoggingConfig()) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log._sinks["logging.tensorboard"].close(False)  # as if the disk were gone
        log.write(1, {"loss": 1.0}, "train")
        log.write(2, {"loss": 1.0}, "train")
        assert steps(log) == [1, 2]
        log.close()
    assert [str(w.message)[:25] for w in caught] == ["logging.tensorboard fails"]


def test_a_tracker_that_does_not_start(tmp_path, wandb, mlflow, monkeypatch):
    def refuse(run_id, run_name):
        raise RuntimeError("Run 'id-1' not found")

    monkeypatch.setattr(mlflow, "start_run", refuse)
    message = (
        r"logging\.mlflow does not start: Run 'id-1' not found; .*set it to null, or remove .*trackers\.json"
    )
    with pytest.raises(ConfigError, match=message):
        open_log(tmp_path, WANDB.model_copy(update={"mlflow": "heads"}))
    assert wandb.finished == [1]  # what had started is ended


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        ("matplotlib.figure", {}, "curves.png needs matplotlib: pip install 'eagle-jax[train]'"),
        (
            "tensorboardX",
            {},
            "logging.tensorboard needs tensorboardX: pip install 'eagle-jax[train]', or set",
        ),
        ("wandb", {"wandb": "heads"}, "logging.wandb needs wandb: pip install wandb"),
        ("mlflow", {"mlflow": "heads"}, "logging.mlflow needs mlflow: pip install mlflow"),
    ],
)
def test_a_missing_library_is_told_at_the_start(tmp_path, monkeypatch, module, config, message):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_log(tmp_path, LoggingConfig(**config))
    assert list(tmp_path.iterdir()) == []

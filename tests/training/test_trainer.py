"""Whole runs on a tiny target: what they write, that they learn, and that an ended one goes on as if it had not."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_models import TAPS, random_pair
from rich.console import Console

from eagle_jax import LLM, SamplingParams
from eagle_jax.convert import read
from eagle_jax.errors import EagleError
from eagle_jax.training import trainer as trainer_module
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.dataset import DatasetWriter
from eagle_jax.training.masks import Sample
from eagle_jax.training.packing import Rows, best_fit
from eagle_jax.training.trainer import Trainer

V, STEPS = 61, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a head for it, and answers that the target would give."""
    folder = tmp_path_factory.mktemp("train")
    target, _ = random_pair(V, 31).save(folder)
    llm = LLM(str(target), batch_size=16)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(3, V, rng.integers(2, 9)).tolist()} for _ in range(48)]
    params = SamplingParams(temperature=0.7, seed=1, max_new_tokens=24, ignore_eos=True)
    with DatasetWriter(folder / "data") as writer:
        for i, (prompt, result) in enumerate(zip(prompts, llm.generate(prompts, params), strict=True)):
            asked, answer = prompt["prompt_token_ids"], list(result.outputs[0].token_ids)
            mask = np.arange(len(asked) + len(answer)) >= len(asked)
            split = "valid" if i < 8 else "train"
            writer.add(split, Sample(f"c{i}", np.asarray(asked + answer, np.int32), mask))
        writer.finish({"vocab_size": V, "eos_token_ids": [2]})
    return folder


def config(folder, output, **keys):
    base = dict(
        model=str(folder / "target"),
        data=[str(folder / "data")],
        output=str(output),
        dtype="float32",
        head={"draft_vocab_size": 31, "taps": TAPS},
        objective={"length": 2},
        optimizer={"learning_rate": 3e-3},
        batch={"rows": 2, "length": 64},
        steps=STEPS,
        evaluation={"every": 4, "prompts": 2, "max_new_tokens": 8, "batch_size": 2},
        checkpoints={"every": 3},
        logging={"every": 1, "tensorboard": False},
    )
    return TrainConfig.model_validate(base | keys)


def run(config):
    return Trainer(config, Console(file=io.StringIO())).run()


def rows(output, kind):
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(output):
    return [row["loss"] for row in rows(output, "train")]


@pytest.fixture(scope="module")
def whole(folder):
    """The uninterrupted run."""
    output = folder / "whole"
    return output, run(config(folder, output))


def equal_heads(one, other):
    one, other = (read(x / "last").params for x in (one, other))
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_writes_heads_that_decode_the_same_text(folder, whole):
    output, outcome = whole
    assert outcome.step == STEPS
    assert [row["step"] for row in rows(output, "train")] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows(output, "valid")] == [4, 8]
    assert outcome.quality == max(row["measured_acceptance_length"] for row in rows(output, "valid"))
    assert (output / "curves.png").stat().st_size > 1000
    for name in ("best", "last"):
        llm = LLM(
            str(folder / "target"),
            speculative_config={
                "model": str(output / name),
                "method": "eagle3",
                "num_speculative_tokens": 3,
            },
        )
        prompts, params = [[5, 6, 7]], SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
        ours, plain = llm.generate(prompts, params), llm.baseline().generate(prompts, params)
        assert ours[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


@pytest.mark.slow
def test_a_head_learns(folder, tmp_path):
    head = {"draft_vocab_size": 31, "taps": TAPS, "start": "random"}
    evaluation = {"every": 60, "prompts": 0}
    run(config(folder, tmp_path / "out", head=head, steps=60, evaluation=evaluation))
    curve = losses(tmp_path / "out")
    assert np.mean(curve[-5:]) < 0.9 * curve[0]


@pytest.mark.slow
def test_the_linear_start_is_better_than_a_random_one(folder, whole, tmp_path):
    head = {"draft_vocab_size": 31, "taps": TAPS, "start": "random"}
    run(config(folder, tmp_path / "out", head=head, steps=1))
    assert losses(whole[0])[0] < losses(tmp_path / "out")[0]


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
import conftest, io, json
from rich.console import Console
from eagle_jax.training import trainer
from eagle_jax.training.config import TrainConfig

class Log(trainer.MetricLog):
    def write(self, step, values, kind):
        super().write(step, values, kind)
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

trainer.MetricLog = Log
trainer.Trainer(TrainConfig.model_validate(json.loads(sys.argv[1])), Console(file=io.StringIO())).run()
"""


def test_a_killed_run_goes_on_bit_for_bit(folder, whole, tmp_path):
    options = config(folder, tmp_path / "out")
    command = [sys.executable, "-c", KILLED, options.model_dump_json()]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert run(options).step == STEPS
    assert losses(tmp_path / "out") == losses(whole[0])
    assert equal_heads(tmp_path / "out", whole[0])


def test_sigterm_saves_and_the_run_goes_on(folder, whole, tmp_path, monkeypatch):
    options = config(folder, tmp_path / "out")

    class Log(trainer_module.MetricLog):
        def write(self, step, values, kind):
            super().write(step, values, kind)
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "MetricLog", Log)
        outcome = run(options)
    assert outcome.signal == signal.SIGTERM
    assert outcome.step < STEPS
    assert run(options).step == STEPS
    assert losses(tmp_path / "out") == losses(whole[0])
    assert equal_heads(tmp_path / "out", whole[0])


def test_a_run_of_another_config_is_refused(folder, whole):
    with pytest.raises(EagleError, match="another config"):
        run(config(folder, whole[0], optimizer={"learning_rate": 1e-3}))


@pytest.mark.slow
def test_accumulated_passes_are_one_batch(folder, tmp_path):
    evaluation = {"every": 3, "prompts": 0}
    for name, batch in (("one", {"rows": 4}), ("two", {"rows": 2, "accumulate": 2})):
        batch = batch | {"length": 64}
        run(config(folder, tmp_path / name, batch=batch, steps=3, evaluation=evaluation))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 1}, {"data": 1, "fsdp": 2, "tensor": 1}])
def test_meshes_learn_the_same(folder, tmp_path, mesh):
    evaluation = {"every": 3, "prompts": 0}
    for name, keys in (("one", {}), ("mesh", {"mesh": mesh})):
        batch = {"rows": 4, "length": 64}
        run(config(folder, tmp_path / name, batch=batch, steps=3, evaluation=evaluation, **keys))
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "one"), rtol=1e-4)


def test_a_warm_start_keeps_the_vocabulary_map(folder, tmp_path):
    run(config(folder, tmp_path / "out", head={"warm_start": str(folder / "head")}, steps=1))
    heads = folder / "head", tmp_path / "out" / "last"
    given, kept = (read(x, target=folder / "target").params for x in heads)
    assert np.array_equal(kept["d2t"], given["d2t"])
    assert not np.array_equal(kept["fc.weight"], given["fc.weight"])


@pytest.mark.slow
def test_eagle1_heads_are_trained_too(folder, tmp_path):
    head = {"method": "eagle"}
    outcome = run(config(folder, tmp_path / "out", head=head, objective={}, steps=2))
    assert outcome.step == 2
    assert "fc.weight" in read(tmp_path / "out" / "last", target=folder / "target").params


@pytest.mark.slow
def test_early_stopping(folder, tmp_path):
    evaluation = {"every": 1, "prompts": 0, "patience": 2}
    optimizer = {"learning_rate": 10.0, "schedule": "constant", "warmup_share": 0.0}
    outcome = run(config(folder, tmp_path / "out", evaluation=evaluation, optimizer=optimizer, steps=STEPS))
    assert outcome.stopped_early
    assert outcome.step < STEPS


def test_packed_rows_hold_every_sample_once():
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    bins = best_fit(np.arange(200), lengths, 64)
    assert sorted(i for b in bins for i in b) == list(range(200))
    assert max(lengths[b].sum() for b in bins) <= 64
    assert len(bins) <= np.ceil(lengths.sum() / 64) * 1.1


def test_rows_number_positions_by_sample(folder):
    from eagle_jax.training.dataset import open_dataset

    dataset = open_dataset(folder / "data", "train")
    packed = Rows.of([dataset], 64, True, 0)
    single = Rows.of([dataset], 64, False, 0)
    assert len(packed) < len(single) == len(dataset)

    def documents(rows):
        for i in range(len(rows)):
            row = rows[i]
            for segment in range(1, row["segments"].max() + 1):
                where = row["segments"] == segment
                assert row["positions"][where].tolist() == list(range(where.sum()))
                yield row["tokens"][where].tolist(), row["mask"][where].tolist()

    assert sorted(documents(packed)) == sorted(documents(single))

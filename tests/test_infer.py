import io
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

import eagle_jax
from eagle_jax.config import InferConfig
from eagle_jax.console.chat import ACCEPTED, OWN, ChatSession, TokenSpans
from eagle_jax.console.prompts import from_jsonl
from eagle_jax.console.report import printable
from eagle_jax.errors import RequestError
from eagle_jax.infer import main, run
from eagle_jax.outputs import CompletionOutput, RequestOutput, StreamChunk
from eagle_jax.sampling_params import SamplingParams

# A token is a character. The model answers a prompt with its text in capitals, which is easy to foretell.


class Tokenizer:
    chat_template: str | None = "{{ messages }}"

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", errors="replace")


@dataclass
class FakeLLM:
    """Answers at once, and remembers what it was asked."""

    config: InferConfig
    calls: list
    speculative: bool = True
    tokenizer: Tokenizer | None = None
    fail_at: str | None = None
    differ_at: str | None = None

    def apply_chat_template(self, messages):
        text = "|".join(f"{m['role'][0]}:{m['content']}" for m in messages)
        return list(f"<{text}>".encode())

    def baseline(self):
        return replace(self, speculative=False)

    def _text(self, prompt) -> str:
        return prompt if isinstance(prompt, str) else bytes(prompt["prompt_token_ids"]).decode()

    def warm_up(self, prompts, params):
        self.calls.append(("warm_up", self.speculative, [self._text(p) for p in prompts]))

    def generate(self, prompts, params):
        texts = [self._text(p) for p in prompts]
        self.calls.append(("generate", self.speculative, texts))
        if self.fail_at is not None and any(self.fail_at in text for text in texts):
            raise RequestError("the prompt is longer than the context")
        outputs = []
        for text in texts:
            samples = [self._answer(text, j) for j in range(params.n)]
            outputs.append(RequestOutput(text, list(text.encode()), samples))
        return outputs

    def _answer(self, text: str, sample: int) -> CompletionOutput:
        answer = text.upper() + "!" * sample
        if self.differ_at is not None and self.differ_at in text and self.speculative:
            answer = answer[:-1] + "?"
        ids = list(answer.encode())
        width = 2 if self.speculative else 1
        steps = [width] * ((len(ids) - 1) // width)
        return CompletionOutput(
            index=sample,
            text=answer,
            token_ids=ids,
            finish_reason="length",
            stop_reason=None,
            logprobs=[{i: -0.5} for i in ids] if self.config.sampling.logprobs is not None else None,
            accept_lengths=steps,
            accepted=[False] * len(ids),
            prefill_seconds=0.25,
            decode_seconds=1.0 if self.speculative else 2.0,
        )

    def stream(self, prompt, params):
        text = self._text(prompt)
        answer = self._answer(text.rpartition(":")[2].rstrip(">"), 0)
        for i in range(0, len(answer.token_ids), 2):
            if self.fail_at is not None and text.endswith(f"{self.fail_at}>") and i:
                raise KeyboardInterrupt
            ids = answer.token_ids[i : i + 2]
            last = i + 2 >= len(answer.token_ids)
            yield StreamChunk(
                bytes(ids).decode(), ids, [True, False][: len(ids)], last, answer if last else None
            )


@pytest.fixture
def made(monkeypatch):
    """Every FakeLLM that a command makes; `made.settings` are what it is made with."""

    class Made(list):
        settings: dict

    made = Made()
    made.settings = {"tokenizer": Tokenizer()}

    class Factory:
        @classmethod
        def from_config(cls, config, *, progress=False):
            made.append(FakeLLM(config, [], **made.settings))
            return made[-1]

    monkeypatch.setattr(eagle_jax, "LLM", Factory, raising=False)
    return made


@pytest.fixture
def command(tmp_path, monkeypatch, made):
    """Runs the command with a config of two rows a batch, and returns its exit code."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: owner/target\nspeculative: {model: owner/head}\nbatch_size: 2\nsampling: {seed: 3}\n"
    )

    def command(*arguments, stdin: str | None = None) -> int:
        stream = io.StringIO(stdin or "")
        stream.isatty = lambda: stdin is None  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)
        return main(["--config", str(config), *map(str, arguments)])

    return command


@pytest.fixture
def answer(tmp_path, command):
    """Runs the command on rows of a JSONL file and returns the rows that it writes."""

    def answer(rows, *arguments) -> list[dict]:
        prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        assert command("--prompts", prompts, "--output", output, *arguments) == 0
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]

    return answer


def error_of(capsys, code: int) -> str:
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


# ------------------------------------------------------------------------------------------- rows and answers


def test_output_rows(answer):
    (row,) = answer([{"prompt": "abcde", "question_id": 7, "category": "x"}])
    assert row == {
        "question_id": 7,
        "category": "x",
        "prompt": "abcde",
        "text": "ABCDE",
        "token_ids": list(b"ABCDE"),
        "finish_reason": "length",
        "stop_reason": None,
        "accept_lengths": [2, 2],
        "mean_acceptance_length": 2.0,
        "prefill_seconds": 0.25,
        "decode_seconds": 1.0,
        "tokens_per_second": 4.0,
    }


def test_kinds_of_rows_in_batches(answer, made):
    rows = answer(
        [
            {"prompt": "raw"},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            {"prompt_token_ids": [104, 105]},
        ]
    )
    assert [row["prompt"] for row in rows] == ["raw", "u", None]
    assert [row["text"] for row in rows] == ["RAW", "<S:S|U:U>", "HI"]
    assert rows[2]["prompt_token_ids"] == [104, 105]
    assert rows[1]["messages"][0] == {"role": "system", "content": "s"}
    assert made[0].calls == [
        ("warm_up", True, ["raw", "<s:s|u:u>"]),
        ("warm_up", True, ["hi"]),
        ("generate", True, ["raw", "<s:s|u:u>"]),
        ("generate", True, ["hi"]),
    ]


def test_turns_go_on_with_the_answers(answer, made):
    rows = answer(
        [
            {"turns": ["a", "b"], "id": 1},
            {"prompt": "p"},
            {"turns": ["c"], "id": 2},
            {"turns": ["d", "e"], "id": 3},
        ]
    )
    assert [(row.get("id"), row.get("turn"), row["prompt"]) for row in rows] == [
        (1, 1, "a"),
        (None, None, "p"),
        (2, 1, "c"),
        (3, 1, "d"),
        (1, 2, "b"),
        (3, 2, "e"),
    ]
    assert made[0].calls[-1] == ("generate", True, ["<u:a|a:<U:A>|u:b>", "<u:d|a:<U:D>|u:e>"])


def test_samples(answer):
    rows = answer([{"prompt": "p"}, {"prompt": "q"}], "sampling.n=3", "sampling.logprobs=0")
    assert [(row["prompt"], row["sample"], row["text"]) for row in rows] == [
        (prompt, sample, prompt.upper() + "!" * sample) for prompt in "pq" for sample in range(3)
    ]
    assert rows[0]["logprobs"] == [{str(ord("P")): -0.5}]


def test_prompts_of_the_command_line_and_of_a_file(tmp_path, command, made, capsys):
    file = tmp_path / "more.jsonl"
    file.write_text('{"prompt": "three"}\n\n', encoding="utf-8")
    assert (
        command("--prompt", "one", "sampling.seed=4", "--prompt", "two", "--prompts", file, "batch_size=4")
        == 0
    )
    assert made[0].calls[-1] == ("generate", True, ["<u:one>", "<u:two>", "three"])
    assert made[0].config.sampling.seed == 4
    shown = capsys.readouterr().out
    for part in ("one", "<U:ONE>", "7 tokens, 6.0 tokens/s, τ 2.00, ended by length", "THREE"):
        assert part in shown


def test_raw_prompts(command, made):
    assert command("--raw", "--prompt", "one") == 0
    assert made[0].calls[-1] == ("generate", True, ["one"])


def test_prompts_without_a_template_are_raw(command, made, monkeypatch):
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    assert command("--prompt", "one") == 0
    assert made[0].calls[-1] == ("generate", True, ["one"])


@pytest.mark.parametrize(
    ("stdin", "expected"),
    [
        ("one\n\ntwo", ["<u:one>", "<u:two>"]),
        ('{"prompt": "one"}\n\n{"turns": ["two"]}\n', ["one", "<u:two>"]),
    ],
)
def test_prompts_from_a_pipe(command, made, stdin, expected):
    assert command(stdin=stdin) == 0
    assert made[0].calls[-1] == ("generate", True, expected)


def test_models_without_a_tokenizer_take_and_show_token_ids(answer, command, made, capsys):
    made.settings = {"tokenizer": None}
    assert answer([{"prompt_token_ids": [104]}])[0]["token_ids"] == [72]
    assert "the model has no tokenizer" in error_of(capsys, command("--prompt", "one"))


# ------------------------------------------------------------------------------------------------- comparison


def test_compare(answer, made, capsys):
    made.settings["differ_at"] = "b"
    rows = answer([{"prompt": "aaaaa"}, {"prompt": "bbbbb"}, {"prompt": "ccccc"}], "--compare")
    assert [row["identical"] for row in rows] == [True, False, True]
    assert [row["speedup"] for row in rows] == [2.0] * 3
    assert rows[1]["baseline"]["text"] == "BBBBB"
    assert set(rows[1]) - set(rows[1]["baseline"]) == {"prompt", "baseline", "identical", "speedup"}
    generated = [(speculative, texts) for name, speculative, texts in made[0].calls if name == "generate"]
    assert generated == [(s, texts) for texts in (["aaaaa", "bbbbb"], ["ccccc"]) for s in (True, False)]

    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bbbbb", "2.0", "4.0", "2.00×", "2.00", "no", "(token", "4)"] in table
    # Three rows of four tokens in two batches: a batch's time counts once.
    assert ["total", "3.0", "6.0", "2.00×", "2.00", "2/3"] in table


def test_compare_shows_both_answers(command, capsys):
    assert command("--raw", "--prompt", "abc", "--compare") == 0
    shown = capsys.readouterr().out
    assert "without speculation" in shown
    assert shown.count("ABC") == 2


def test_compare_batches_of_samples(made):
    config = InferConfig(model="m", batch_size=2, sampling={"n": 3})
    llm = FakeLLM(config, [], tokenizer=Tokenizer())
    (batch,) = run(llm, config, from_jsonl(['{"prompt": "p"}'], "x"), compare=True)
    assert (batch.decode_seconds, batch.baseline_decode_seconds) == (2.0, 4.0)  # two samples, then one


# --------------------------------------------------------------------------------------------------- the file


def test_finished_batches_are_kept(tmp_path, command, made, capsys):
    made.settings["fail_at"] = "c"
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{c}"}}\n' for c in "abcd"), encoding="utf-8")
    error = error_of(capsys, command("--prompts", prompts, "--output", output))
    assert "prompts.jsonl:3 to " in error
    assert "prompts.jsonl:4: the prompt is longer than the context" in error
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["A", "B"]


def test_half_a_character_does_not_lose_the_batch(tmp_path, command):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a", "id": "\\ud800"}\n{"prompt": "é"}\n', encoding="utf-8")
    assert command("--prompts", prompts, "--output", output) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row.get("id") for row in rows] == ["\ud800", None]
    assert rows[1]["prompt"] == "é"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(command, capsys):
    assert "cannot be written" in error_of(capsys, command("--prompt", "a", "--output", "/dev/full"))


def test_each_batch_is_in_the_file_before_the_next_runs(tmp_path, command, made, monkeypatch):
    output = tmp_path / "out.jsonl"
    output.write_text("of an earlier run\n")
    seen = []
    generate = FakeLLM.generate

    def spy(self, prompts, params):
        seen.append(output.read_text().count('"text"'))
        return generate(self, prompts, params)

    monkeypatch.setattr(FakeLLM, "generate", spy)
    assert command("--output", output, *(x for c in "abcde" for x in ("--prompt", c))) == 0
    assert seen == [0, 2, 4]
    assert len(output.read_text().splitlines()) == 5


def test_profile(tmp_path, command, monkeypatch):
    import jax

    entered = []

    class Trace:
        def __init__(self, folder):
            self.folder = folder

        def __enter__(self):
            entered.append(self.folder)

        def __exit__(self, *exception):
            entered.append("left")

    monkeypatch.setattr(jax.profiler, "trace", Trace)
    assert command("--prompt", "a", "--profile", tmp_path / "trace") == 0
    assert entered == [tmp_path / "trace", "left"]


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"prompt": "a"', ["not valid JSON", "column"]),
        ("[" * 100_000, ["not valid JSON", "recursion"]),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", ["not valid JSON", "digits"]),
        ("[1]", ["got [1]; expected {", '"turns"']),
        ('{"text": "a"}', ["a row with the keys text; expected one of {", '"prompt_token_ids"']),
        ('{"prompt": "a", "turns": ["b"]}', ["a row with prompt and turns; expected one of"]),
        ('{"prompt": ""}', ['prompt: got ""; expected a text that is not empty']),
        ('{"turns": []}', ["turns: got []; expected a list of texts"]),
        ('{"messages": ["a"]}', ['messages: got ["a"]; expected a list such as']),
        ('{"prompt_token_ids": [true]}', ["prompt_token_ids: got [true]; expected a list of token ids"]),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, command, capsys, line, parts):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "good"}}\n\n{line}\n', encoding="utf-8")
    error = error_of(capsys, command("--prompts", prompts))
    for part in ["prompts.jsonl:3: ", *parts]:
        assert part in error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "there are no prompts"),
        (["--prompt", " "], "--prompt 1: the prompt is empty"),
        (["--prompts", "/no/such.jsonl"], "/no/such.jsonl: cannot be read: No such file"),
        (["--prompt", "a", "--output", "/"], "this is a folder"),
        (["--prompt", "a", "--output", "/no/such/out.jsonl"], "there is no folder /no/such"),
        (["--prompt", "a", "sampling.topp=1"], "sampling.topp: unknown key; did you mean sampling.top_p?"),
        (["--prompt", "a", "--colour"], "unrecognized arguments: --colour"),
        (["--prompt", "a", "--compare", "speculative=null"], "speculative is null"),
        (["--chat", "--prompt", "a"], "--chat and --prompt do not go together"),
        (["--chat", "sampling.n=2"], "sampling.n is 2, expected 1"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(command, capsys, made, arguments, part):
    assert part in error_of(capsys, command(*arguments))
    assert not made


def test_config_is_asked_for(capsys):
    assert "--config is missing; expected a YAML file or an installed config (" in error_of(capsys, main([]))


def test_turns_need_one_sample(tmp_path, command, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a", "b"]}\n', encoding="utf-8")
    assert "sampling.n is 2" in error_of(capsys, command("--prompts", prompts, "sampling.n=2"))
    assert "would be overwritten" in error_of(capsys, command("--prompts", prompts, "--output", prompts))


def test_conversations_need_a_template(tmp_path, command, capsys, monkeypatch):
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a", "b"]}\n', encoding="utf-8")
    assert "no chat template for turns" in error_of(capsys, command("--prompts", prompts))
    assert "--chat needs a chat template" in error_of(capsys, command("--chat"))


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError("two\nlines"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(command, made, capsys, monkeypatch, error, code):
    def fail(self, prompts, params):
        raise error

    monkeypatch.setattr(FakeLLM, "generate", fail)
    assert command("--prompt", "a") == code
    assert capsys.readouterr().err == ("error: --prompt 1: two lines\n" if code == 2 else "")


def test_errors_of_checkpoints(command, capsys, monkeypatch, made):
    from eagle_jax.checkpoints.source import CheckpointError

    def fail(cls, config, *, progress=False):
        raise CheckpointError("model.safetensors is truncated")

    monkeypatch.setattr(eagle_jax.LLM, "from_config", classmethod(fail))
    assert "model.safetensors is truncated" in error_of(capsys, command("--prompt", "a"))


def test_defects_keep_their_traceback(command, monkeypatch):
    monkeypatch.setattr(FakeLLM, "generate", lambda *a: [][0])
    with pytest.raises(IndexError):
        command("--prompt", "a")
    monkeypatch.setattr(FakeLLM, "generate", lambda *a: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        command("--prompt", "a")


def test_help_is_instant():
    code = (
        "import sys\nfrom eagle_jax.infer import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'jax', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for part in ("--compare", "speculative.tree.top_k (kind: dynamic)", "infer-smollm2-eagle3.1", '"turns"'):
        assert part in shown


# ------------------------------------------------------------------------------------------------------- chat


def chat(command, capsys, *lines) -> str:
    assert command("--chat", stdin="".join(f"{line}\n" for line in lines)) == 0
    return capsys.readouterr().out


def test_chat(command, capsys, made):
    shown = chat(command, capsys, "hello", "", "again")
    assert shown.startswith("accepted draft · target's own token")
    for part in ("> hello\nHELLO\nτ 2.00 · 4.0 tokens/s · 5 tokens\n", "> again\nAGAIN\n"):
        assert part in shown
    assert made[0].calls == [
        ("warm_up", True, ["<u:hello>"]),
        ("warm_up", True, ["<u:hello|a:HELLO|u:again>"]),
    ]


def test_chat_commands(command, capsys, made):
    shown = chat(command, capsys, "hello", "/reset", "anew", "/what", "/exit", "never")
    assert "unknown command /what; there are /reset and /exit" in shown
    assert "NEVER" not in shown
    assert made[0].calls[-1] == ("warm_up", True, ["<u:anew>"])


def test_ctrl_c_stops_the_answer_and_not_the_session(command, capsys, made):
    made.settings["fail_at"] = "stop me"
    shown = chat(command, capsys, "stop me", "go on")
    assert "ST\nstopped\n" in shown
    assert "GO ON\n" in shown
    assert made[0].calls[-1][2] == ["<u:stop me|a:ST|u:go on>"]


def test_chat_goes_on_after_an_error(command, capsys, made, monkeypatch):
    def warm_up(self, prompts, params):
        self.calls.append(self._text(prompts[0]))
        if "long" in self.calls[-1]:
            raise RequestError("the prompt is longer\nthan the context")

    monkeypatch.setattr(FakeLLM, "warm_up", warm_up)
    shown = chat(command, capsys, "long", "short")
    assert "error: the prompt is longer than the context (/reset starts anew)" in shown
    assert "SHORT\n" in shown
    assert made[0].calls[-1] == "<u:short>"


def test_chat_colours():
    config = InferConfig(model="m")
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    ChatSession(FakeLLM(config, [], tokenizer=Tokenizer()), SamplingParams(temperature=0), console).ask("ab")
    codes = {"green": "32", "yellow": "33"}
    expected = f"\x1b[{codes[ACCEPTED]}mA\x1b[0m\x1b[{codes[OWN]}mB\x1b[0m"
    assert expected in console.file.getvalue()  # type: ignore[attr-defined]


def test_spans_follow_tokens_that_are_no_whole_characters():
    spans = TokenSpans(Tokenizer())
    euro = list("€".encode())
    assert spans.split("", euro[:2], [True, True]) == []
    assert spans.split("€a", [euro[2], ord("a")], [False, True]) == [("€", False), ("a", True)]


def test_spans_when_text_lags_behind_its_tokens():
    spans = TokenSpans(Tokenizer())
    assert spans.split("a", list(b"abc"), [True, False, True]) == [("a", True)]
    assert spans.split("b", [], []) == [("b", False)]
    assert spans.split("cd", list(b"d"), [False]) == [("c", True), ("d", False)]
    assert spans.split("beyond", [], []) == [("beyond", False)]


def test_control_characters_are_not_shown():
    assert printable("a\x1b[2Jb\x07\n\tc é 字") == "a�[2Jb�\n\tc é 字"

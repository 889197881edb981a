"""Answer prompts: `python -m eagle_jax.infer --config FILE|NAME [key=value …] --prompt TEXT`.

Reads arguments, runs rows in batches, writes rows. How a model answers is `eagle_jax.llm`'s business.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eagle_jax.config import InferConfig, describe_keys, installed_configs, load_config
from eagle_jax.console import prompts as prompt_rows
from eagle_jax.console.chat import ChatSession
from eagle_jax.console.command import Parser, exit_code
from eagle_jax.console.prompts import PromptRow
from eagle_jax.console.report import Row, Totals, print_answers, print_summary
from eagle_jax.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from eagle_jax import LLM, CompletionOutput, RequestOutput

# --------------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Request:
    """One answer to be generated.

    Attributes:
        row: the prompt row that it belongs to.
        prompt: what the model is given: text or `{"prompt_token_ids": […]}`.
        shown: what the output row calls the prompt; for a turn, what the user says in it.
        turn: which of the row's turns this is, from 1; 0 for rows without turns.
        conversation: a turn's messages so far.
    """

    row: PromptRow
    prompt: str | dict[str, list[int]]
    shown: str | None
    turn: int = 0
    conversation: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class Batch:
    """The output rows of one batch, and the wall time of decoding it, with and without speculation."""

    rows: list[Row]
    decode_seconds: float
    baseline_decode_seconds: float


def run(
    llm: "LLM",
    config: InferConfig,
    rows: Sequence[PromptRow],
    *,
    compare: bool = False,
    profile: Path | None = None,
    show_progress: bool = False,
) -> Generator[Batch, None, None]:
    """Answer `rows` in batches of `config.batch_size`: all first turns, then all second ones, and so on.

    Args:
        llm: the model, made from `config`.
        config: sampling and batch size.
        rows: what to answer.
        compare: also answer without speculation, the same batches.
        profile: a folder for a profiler trace of the generation, compilation left out.
        show_progress: keep a bar on the terminal while generating, and not just while compiling.
    """
    from eagle_jax import SamplingParams

    params = SamplingParams(**config.sampling.model_dump())
    baseline = llm.baseline() if compare else None
    per_batch = max(1, config.batch_size // config.sampling.n)
    requests = [_first_request(llm, row) for row in rows]
    with contextlib.ExitStack() as stack:
        while requests:
            batches = [requests[i : i + per_batch] for i in range(0, len(requests), per_batch)]
            with _progress(shown=True) as bar:
                for batch in bar.track(batches, description="Compiling"):
                    with _naming_rows(batch):
                        llm.warm_up([request.prompt for request in batch], params)
                        if baseline is not None:
                            baseline.warm_up([request.prompt for request in batch], params)
            if profile is not None:
                import jax

                stack.enter_context(jax.profiler.trace(profile))
                profile = None
            requests = []
            with _progress(shown=show_progress) as bar:
                for batch in bar.track(batches, description="Generating"):
                    inputs = [request.prompt for request in batch]
                    with _naming_rows(batch):
                        outputs = llm.generate(inputs, params)
                        plain = baseline.generate(inputs, params) if baseline is not None else None
                    yield _collect(batch, outputs, plain, config)
                    for request, output in zip(batch, outputs, strict=True):
                        if request.turn and request.turn < request.row.rounds:
                            requests.append(_next_turn(llm, request, output.outputs[0].text))


def _progress(*, shown: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not (shown and console.is_terminal)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=hidden)


def _first_request(llm: "LLM", row: PromptRow) -> Request:
    templated = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
    if row.kind == "prompt_token_ids":
        return Request(row, {"prompt_token_ids": row.value}, None)
    if llm.tokenizer is None:
        raise RequestError(f'{row.where}: the model has no tokenizer; give {{"prompt_token_ids": [ID, …]}}')
    if row.kind == "prompt" or (row.kind == "question" and not templated):
        return Request(row, row.value, row.value)
    if not templated:
        raise RequestError(
            f'{row.where}: the model has no chat template for {row.kind}; give {{"prompt": TEXT}}'
        )
    if row.kind == "turns":
        return _next_turn(llm, Request(row, "", None), None)
    messages = row.value if row.kind == "messages" else [{"role": "user", "content": row.value}]
    prompt = {"prompt_token_ids": llm.apply_chat_template(messages)}
    return Request(row, prompt, messages[-1]["content"])


def _next_turn(llm: "LLM", request: Request, answer: str | None) -> Request:
    """The request that follows an answered one, or (answer None) the first of its row."""
    said = [] if answer is None else [{"role": "assistant", "content": answer}]
    question = request.row.value[request.turn]
    conversation = (*request.conversation, *said, {"role": "user", "content": question})
    prompt = {"prompt_token_ids": llm.apply_chat_template(list(conversation))}
    return Request(request.row, prompt, question, request.turn + 1, conversation)


@contextlib.contextmanager
def _naming_rows(batch: Sequence[Request]) -> Iterator[None]:
    """Say which rows a request error is about."""
    try:
        yield
    except RequestError as error:
        first, last = batch[0].row.where, batch[-1].row.where
        raise RequestError(f"{first if len(batch) == 1 else f'{first} to {last}'}: {error}") from None


def _collect(
    batch: Sequence[Request],
    outputs: Sequence["RequestOutput"],
    plain: Sequence["RequestOutput"] | None,
    config: InferConfig,
) -> Batch:
    rows = []
    for i, (request, output) in enumerate(zip(batch, outputs, strict=True)):
        for j, completion in enumerate(output.outputs):
            row: Row = dict(request.row.extra)
            if request.turn:
                row["turn"] = request.turn
            if config.sampling.n > 1:
                row["sample"] = completion.index
            row["prompt"] = request.shown
            if request.row.kind in ("messages", "prompt_token_ids"):
                row[request.row.kind] = request.row.value
            row |= _fields(completion)
            if plain is not None:
                row["baseline"] = _fields(plain[i].outputs[j])
                row["identical"] = row["token_ids"] == row["baseline"]["token_ids"]
                seconds = row["decode_seconds"]
                row["speedup"] = row["baseline"]["decode_seconds"] / seconds if seconds else None
            rows.append(row)
    baseline_rows = [row["baseline"] for row in rows] if plain is not None else []
    size = config.batch_size
    return Batch(rows, _wall_seconds(rows, size), _wall_seconds(baseline_rows, size))


def _wall_seconds(rows: Sequence[Row], batch_size: int) -> float:
    # Rows that ran together all carry their batch's time; samples beyond the batch size ran in turn.
    times = [row["decode_seconds"] for row in rows]
    return sum(max(times[i : i + batch_size]) for i in range(0, len(times), batch_size))


def _fields(completion: "CompletionOutput") -> Row:
    fields: Row = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "accept_lengths": completion.accept_lengths,
        "mean_acceptance_length": completion.mean_acceptance_length,
        "prefill_seconds": completion.prefill_seconds,
        "decode_seconds": completion.decode_seconds,
        "tokens_per_second": completion.tokens_per_second,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = completion.logprobs
    return fields


class RowWriter:
    """Appends rows to a JSONL file, which is begun with the first and complete after each batch.

    Args:
        path: the file; replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # said by `write`, which flushes
                self._file.close()

    def write(self, rows: Sequence[Row]) -> None:
        """Append a batch's rows; when this returns they are in the file. Half a surrogate pair stays a JSON escape."""
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
            for row in rows:
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"--output {self._path}: cannot be written: {error.strerror}") from None


# -------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    width = max(60, min(110, shutil.get_terminal_size().columns)) - 2
    parser = Parser(
        prog="python -m eagle_jax.infer",
        usage="python -m eagle_jax.infer --config FILE|NAME [key=value …] [--prompt TEXT]…\n"
        "         [--prompts FILE.jsonl] [--output FILE.jsonl] [--raw] [--chat] [--compare] [--profile DIR]",
        description="Generate text with speculative decoding: the same text as without, sooner.",
        epilog=f"""\
prompt rows (--prompts), one JSON object a line; other keys are copied to the output row:
  {{"prompt": TEXT}}                                    raw text
  {{"messages": [{{"role": …, "content": TEXT}}, …]}}     through the chat template
  {{"turns": [TEXT, …]}}                                the same, each answered before the next is asked
  {{"prompt_token_ids": [ID, …]}}                       for models without a tokenizer, too

output rows (--output), one JSON object an answer:
  prompt, text, token_ids, finish_reason, stop_reason, accept_lengths (tokens that each verification step
  emitted; the first token comes from the prefill), mean_acceptance_length, prefill_seconds, decode_seconds
  (of the whole batch), tokens_per_second; turn (from 1) for turns; sample (from 0) where sampling.n > 1;
  logprobs where asked; with --compare also baseline (the same fields), identical and speedup

installed configs: {", ".join(installed_configs()) or "none"}

keys of the config, which key=value arguments override (values are YAML, as in sampling.top_p=0.9,
"speculative.tree={{kind: chain, num_tokens: 3}}", speculative=null):
{describe_keys(InferConfig, width)}
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="override keys of the config (see below)")
    add("--config", metavar="FILE|NAME", help="a YAML file, or the name of an installed config")
    add("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be given several times")
    add("--prompts", metavar="FILE.jsonl", type=Path, help="a file of prompt rows (see below)")
    add("--output", metavar="FILE.jsonl", type=Path, help="write answers here, each batch as it is done")
    add("--raw", action="store_true", help="do not put --prompt texts through the chat template")
    add("--chat", action="store_true", help="an interactive session; colours show which tokens were drafted")
    add("--compare", action="store_true", help="also run without speculation, and compare texts and times")
    add(
        "--profile",
        metavar="DIR",
        type=Path,
        help="write a profiler trace of the generation into this folder",
    )
    return parser


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, InferConfig, list[PromptRow]]:
    """Everything that can be found wrong before a model is loaded."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.config is None:
        names = ", ".join(installed_configs()) or "none"
        raise ConfigError(f"--config is missing; expected a YAML file or an installed config ({names})")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.compare and config.speculative is None:
        raise ConfigError("--compare compares with no speculation, and there is none: speculative is null")
    if arguments.chat:
        for name in ("prompt", "prompts", "output", "raw", "compare", "profile"):
            if getattr(arguments, name):
                raise ConfigError(f"--chat and --{name} do not go together")
        if config.sampling.n > 1:
            raise ConfigError(
                f"--chat gives one answer at a time: sampling.n is {config.sampling.n}, expected 1"
            )
        return arguments, config, []

    rows = prompt_rows.from_texts(arguments.prompt, "--prompt", raw=arguments.raw)
    if arguments.prompts is not None:
        rows += prompt_rows.from_file(arguments.prompts)
    elif not rows and not sys.stdin.isatty():
        rows = prompt_rows.from_pipe(sys.stdin, raw=arguments.raw)
    if not rows:
        raise ConfigError(
            "there are no prompts: give --prompt TEXT, --prompts FILE.jsonl or --chat, or pipe prompts in"
        )
    for row in rows:
        if row.rounds > 1 and config.sampling.n > 1:
            raise RequestError(
                f"{row.where}: turns go on from one answer: sampling.n is {config.sampling.n}, expected 1"
            )
    if arguments.output is not None:
        _check_output(arguments.output, arguments.prompts)
    return arguments, config, rows


def _check_output(output: Path, prompts: Path | None) -> None:
    if output.is_dir():
        raise ConfigError(f"--output {output}: this is a folder; expected a file")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.absolute().parent}")
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise ConfigError(f"--output {output}: cannot be written: permission denied")
    if prompts is not None and output.exists() and output.samefile(prompts):
        raise ConfigError(f"--output {output}: this is the file of prompts, and it would be overwritten")


# ------------------------------------------------------------------------------------------------------- main


def _answer_rows(
    arguments: argparse.Namespace, config: InferConfig, rows: list[PromptRow], llm: "LLM"
) -> None:
    console = Console()
    finished: list[Row] = []
    totals = Totals()
    with contextlib.ExitStack() as stack:
        batches = run(
            llm,
            config,
            rows,
            compare=arguments.compare,
            profile=arguments.profile,
            # Answers shown on the terminal as they come are progress enough, and would tear the bar.
            show_progress=arguments.output is not None or not console.is_terminal,
        )
        stack.callback(batches.close)
        writer = stack.enter_context(RowWriter(arguments.output)) if arguments.output is not None else None
        for batch in batches:
            if writer is not None:
                writer.write(batch.rows)
            else:
                print_answers(console, batch.rows)
            if arguments.compare:
                finished += batch.rows
                totals.add(batch.rows, batch.decode_seconds, batch.baseline_decode_seconds)
    if arguments.compare:
        print_summary(console, finished, totals)


def _chat(config: InferConfig, llm: "LLM") -> None:
    from eagle_jax import SamplingParams

    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise RequestError("--chat needs a chat template, and this model has none; use --prompt TEXT")
    ChatSession(llm, SamplingParams(**config.sampling.model_dump()), Console()).run(sys.stdin)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; see `exit_code`."""

    def command() -> None:
        arguments, config, rows = _parse(argv)
        from eagle_jax import LLM

        llm = LLM.from_config(config, progress=Console(stderr=True).is_terminal)
        if arguments.chat:
            _chat(config, llm)
        else:
            _answer_rows(arguments, config, rows, llm)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

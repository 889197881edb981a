"""Text of a growing answer: unfinished characters and possible beginnings of stop texts are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


def decode(tokenizer: PreTrainedTokenizerBase | None, token_ids: Sequence[int]) -> str:
    """Text of an answer without special tokens; empty for a model without a tokenizer."""
    if tokenizer is None:
        return ""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class Detokenizer:
    """Follows one answer as its tokens come.

    Args:
        tokenizer: None yields no text, and finds no stop texts.
        stop: texts that end the answer.
        min_tokens: stop texts that are complete within this many first tokens do not count.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = (), min_tokens: int = 0
    ):
        self.tokenizer, self.stop, self.min_tokens = tokenizer, tuple(stop), min_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped_by: str | None = None
        self._prefixes = [0]  # tokens at which the text so far ended in a whole character
        self._whole = ""  # text of the tokens before the last of these
        self._searched = 0  # no stop text counts that ends before
        self._released = 0

    def push(self, token_ids: Sequence[int]) -> int:
        """Appends tokens until a stop text is complete.

        Returns:
            How many of the tokens belong to the answer: all, or those up to the one that completes the stop
            text. `text` then ends before the stop text, and `stopped_by` holds it.
        """
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            self._decode()
            if len(self.token_ids) <= self.min_tokens:
                self._searched = self._whole_end()
                continue
            found = [(at, s) for s in self.stop if (at := self.text.find(s, self._search_start(s))) >= 0]
            if found:
                at, self.stopped_by = min(found)
                self.text = self.text[:at]
                return count
            self._searched = self._whole_end()
        return len(token_ids)

    def release(self, whole: str | None = None) -> str:
        """The text that is new and certain since the last call; the rest of `whole`, the finished text."""
        if whole is None:
            end = self._whole_end()
            end -= max((self._overlap(s, end) for s in self.stop), default=0)
            whole = self.text[:end]
        new = whole[self._released :]
        self._released += len(new)
        return new

    def _search_start(self, stop: str) -> int:
        """Where a stop text that the last token completes can begin at the earliest."""
        return max(0, self._searched - len(stop) + 1)

    def _whole_end(self) -> int:
        """Length of the text without a character that may be unfinished."""
        return len(self.text.rstrip(REPLACEMENT))

    def _overlap(self, stop: str, end: int) -> int:
        """Length of the longest beginning of `stop` that the text ends in."""
        return next((n for n in range(min(len(stop), end), 0, -1) if self.text[:end].endswith(stop[:n])), 0)

    def _decode(self) -> None:
        """Decodes the last few tokens only: from the last but one place where the text was whole.

        Tokens cannot be decoded one by one, since a tokenizer may drop or add a space at the front of what it
        is given.
        """
        anchor = self._prefixes[-2] if len(self._prefixes) > 1 else 0
        known = decode(self.tokenizer, self.token_ids[anchor : self._prefixes[-1]])
        both = decode(self.tokenizer, self.token_ids[anchor:])
        self.text = self._whole + both[len(known) :]
        if not both.endswith(REPLACEMENT) and len(both) > len(known):
            self._prefixes.append(len(self.token_ids))
            self._whole = self.text

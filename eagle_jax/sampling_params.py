"""How one request is to be sampled, under the names that users of vLLM know."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from numbers import Integral, Real

from eagle_jax.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request.

    One seed gives one text, whatever else is in the batch and however it is drafted.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens that together have this probability.
        top_k: keep this many of the most likely tokens; 0 or −1 keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one.
        repetition_penalty: above 1, tokens of prompt and output become less likely (as in Hugging Face).
        max_new_tokens: end after this many tokens. `max_tokens` is the same.
        min_new_tokens: no stop token or stop text before this many tokens. `min_tokens` is the same.
        seed: what the noise is drawn from; sample j of n draws from (seed, j).
        n: answers for each prompt.
        stop: texts that end the answer; they are not part of its text.
        stop_token_ids: token ids that end the answer, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: report log-probabilities of the raw logits, of the token and of this many best ones.

    Raises:
        RequestError: a value out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    max_tokens: InitVar[int | None] = None
    min_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None, min_tokens: int | None) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if max_tokens is not None:
            put("max_new_tokens", max_tokens)
        if min_tokens is not None:
            put("min_new_tokens", min_tokens)
        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        put("stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.top_k == -1:
            put("top_k", 0)
        self._check()

    def _check(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number, got {value!r}")
        for name in ("top_k", "max_new_tokens", "min_new_tokens", "seed", "n", "logprobs"):
            value = getattr(self, name)
            if not _is_integer(value) and not (name == "logprobs" and value is None):
                raise RequestError(f"{name} must be a whole number, got {value!r}")
        bounds = {
            "temperature": (0 <= self.temperature <= 1e30, "between 0 and 1e30"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (0 <= self.top_k < 2**31, "at least 0 (0 or -1 keeps all)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0 < self.repetition_penalty <= 1e30, "above 0 and at most 1e30"),
            "max_new_tokens": (1 <= self.max_new_tokens < 2**31, "at least 1 and below 2^31"),
            "min_new_tokens": (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"between 0 and max_new_tokens {self.max_new_tokens}",
            ),
            "seed": (0 <= self.seed < 2**32, "between 0 and 2^32 - 1"),
            "n": (self.n >= 1, "at least 1"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "at least 0, or None"),
        }
        for name, (holds, allowed) in bounds.items():
            if not holds:
                raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        if not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be texts, got {self.stop!r}; token ids go to stop_token_ids")
        if not all(_is_integer(token) and 0 <= token < 2**31 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        if "" in self.stop:
            raise RequestError("stop holds an empty text, which would end every answer at once")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)

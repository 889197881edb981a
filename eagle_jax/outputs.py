"""What a request comes back with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's n samples.
        text: without special tokens, stop tokens and stop texts.
        token_ids: the generated tokens, a final stop token included.
        finish_reason: "stop" (a stop token or text) or "length".
        stop_reason: the stop text, or the stop token that is not one of the model's own; else None.
        logprobs: for each token {token id: log-probability of the raw logits}, if asked for.
        accept_lengths: tokens emitted by each verification step after all cuts. The prefill's token is in no
            step, so 1 + sum = len(token_ids).
        accepted: for each token, whether it was an accepted draft (else the target's own next token).
        prefill_seconds, decode_seconds: wall time of the batch that the answer was part of.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None
    accept_lengths: list[int]
    accepted: list[bool]
    prefill_seconds: float
    decode_seconds: float

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens for each verification step; 1 for plain decoding."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the verification steps over the time of decoding, prefill left out."""
        return sum(self.accept_lengths) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and its n answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer.

    Attributes:
        text: what is new; text that may turn out to begin a stop text or an unfinished character is held
            back.
        token_ids: the tokens that have come, which may be ahead of the text.
        accepted: for each of them, whether it was an accepted draft.
        finished: this is the last chunk.
        output: the whole answer; on the last chunk only.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    finished: bool
    output: CompletionOutput | None = None

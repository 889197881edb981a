"""An interactive session that shows, token by token, what the drafts have won."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from eagle_jax.console.report import printable
from eagle_jax.detokenizer import decode
from eagle_jax.errors import RequestError

if TYPE_CHECKING:
    from eagle_jax import LLM, SamplingParams

ACCEPTED, OWN = "green", "yellow"


class ChatSession:
    """One conversation: what has been said, and where it is shown.

    Args:
        llm: a model that has a chat template.
        params: how each answer is sampled.
        console: where answers go.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", console: Console) -> None:
        self.llm = llm
        self.params = params
        self.console = console
        self.messages: list[dict[str, str]] = []

    def run(self, stream: TextIO) -> None:
        """Answer what `stream` says, line by line, until it ends or says /exit."""
        self.console.print(Text.assemble(("accepted draft", ACCEPTED), " · ", ("target's own token", OWN)))
        self.console.print(Text("/reset forgets, /exit leaves, Ctrl-C stops an answer", style="dim"))
        for line in self._lines(stream):
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self.messages.clear()
                    self.console.print(Text("The conversation starts anew.", style="dim"))
                case command if command.startswith("/"):
                    self.console.print(
                        Text(f"unknown command {command}; there are /reset and /exit", style="dim")
                    )
                case question:
                    self.ask(question)

    def ask(self, question: str) -> None:
        """Stream the answer to a question; what cannot be answered is said, and forgotten."""
        self.messages.append({"role": "user", "content": question})
        answer, output, problem = "", None, ""
        spans = TokenSpans(self.llm.tokenizer)
        try:
            prompt = {"prompt_token_ids": self.llm.apply_chat_template(self.messages)}
            with self._waiting():
                self.llm.warm_up([prompt], self.params)
            for chunk in self.llm.stream(prompt, self.params):
                for text, accepted in spans.split(chunk.text, chunk.token_ids, chunk.accepted):
                    style = ACCEPTED if accepted else OWN
                    self.console.print(Text(printable(text), style=style), end="", soft_wrap=True)
                answer += chunk.text
                output = chunk.output
        except KeyboardInterrupt:
            problem = "stopped"
        except RequestError as error:
            problem = f"error: {' '.join(str(error).split())} (/reset starts anew)"
        if answer:
            self.console.print()
        if output is not None:
            facts = f"τ {output.mean_acceptance_length:.2f} · {output.tokens_per_second:.1f} tokens/s"
            self.console.print(Text(f"{facts} · {len(output.token_ids)} tokens", style="dim"))
        if problem:
            self.console.print(Text(problem, style="dim"), soft_wrap=True)
        if answer or output is not None:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()  # two questions in a row are no conversation that a template knows

    def _waiting(self) -> contextlib.AbstractContextManager[object]:
        if not self.console.is_terminal:
            return contextlib.nullcontext()
        return self.console.status("Compiling")

    def _lines(self, stream: TextIO) -> Iterator[str]:
        if not (stream is sys.stdin and stream.isatty()):
            for line in stream:
                self.console.print(Text(f"> {line.rstrip()}", style="bold"), soft_wrap=True)
                yield line
            return
        with contextlib.suppress(ImportError):  # gives `input` a history and line editing where there is one
            import readline  # noqa: F401
        while True:
            try:
                yield input("> ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print(Text("\n/exit or Ctrl-D leaves", style="dim"))


class TokenSpans:
    """Splits streamed text at the tokens that it came from.

    A token is not a piece of text: a character may need several, and text may be held back while a stop
    string could still begin. So tokens and text arrive apart, and the lengths of the tokens' texts tell where
    to cut.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = (
            0  # tokens from here on are decoded again with each new one: some read differently alone
        )
        self._read = 0
        self._pending: list[tuple[int, bool]] = []
        self._last = False

    def split(self, text: str, token_ids: Sequence[int], accepted: Sequence[bool]) -> list[tuple[str, bool]]:
        """Pieces of `text`, each with whether its token was an accepted draft.

        Args:
            text: what has become certain since the last call.
            token_ids: the tokens that have come since the last call.
            accepted: for each of them, whether it was an accepted draft.
        """
        for token, won in zip(token_ids, accepted, strict=True):
            self._add(token, won)
        pieces = []
        while text and self._pending:
            length, self._last = self._pending.pop(0)
            if length > len(text):
                self._pending.insert(0, (length - len(text), self._last))
            pieces.append((text[:length], self._last))
            text = text[length:]
        return [*pieces, (text, self._last)] if text else pieces

    def _add(self, token: int, accepted: bool) -> None:
        self._ids.append(token)
        before = decode(self._tokenizer, self._ids[self._context : self._read])
        after = decode(self._tokenizer, self._ids[self._context :])
        if len(after) > len(before) and not after.endswith("\ufffd"):  # else a character is still incomplete
            self._pending.append((len(after) - len(before), accepted))
            self._context, self._read = self._read, len(self._ids)

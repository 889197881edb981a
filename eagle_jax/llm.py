"""The library's front door: a target, perhaps a draft head, and requests.

    llm = LLM("model", speculative_config={"model": "head", "method": "eagle3", "num_speculative_tokens": 3})
    llm.generate(["Once upon a time"], SamplingParams(temperature=0))

Requests run in fixed batches: every row is prefilled, and all go on until the last has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.checkpoints.resolve import load_tokenizer, resolve_checkpoint
from eagle_jax.config import (
    ChainConfig,
    InferConfig,
    SpeculativeConfig,
    StaticConfig,
    TreeConfig,
    parse,
    resolve_model,
)
from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.state import RUNNING, STOPPED, DecodeState
from eagle_jax.decoding.step import DecodeParams, Decoding
from eagle_jax.detokenizer import Detokenizer, decode
from eagle_jax.draft_tree import DynamicTree, StaticTree, Tree, named_paths
from eagle_jax.drafters.eagle_drafter import EagleDrafter
from eagle_jax.drafters.no_draft import NoDraft
from eagle_jax.drafters.protocol import Drafter
from eagle_jax.errors import RequestError
from eagle_jax.loading import LoadedTarget, load_head, load_target, read_target_config
from eagle_jax.outputs import CompletionOutput, RequestOutput, StreamChunk
from eagle_jax.parallel.memory import check_fits
from eagle_jax.parallel.mesh import MeshShape, check_mesh, make_mesh
from eagle_jax.parallel.sharding import TARGET_RULES
from eagle_jax.progress import loading_bar
from eagle_jax.sampling import RowSampling
from eagle_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]

SMALLEST_CAPACITY = 128
SMALLEST_CHUNK = 64
STOP_TEXT_STEPS = 8  # steps between two looks at the text, where a stop text must be found
STREAM_STEPS = 2


@dataclass(frozen=True)
class _Row:
    """One answer to be generated."""

    request: int
    sample: int
    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class _Shapes:
    """What the programs of a batch are compiled for."""

    rows: int
    capacity: int
    chunk: int
    stop_ids: int
    num_logprobs: int | None


class LLM:
    """A target with its tokenizer, and the drafter that speeds it up.

    Args:
        model: a folder, a .gguf file, an Orbax folder, a hub id, or `package:<package>/<file>`.
        speculative_config: keys of the config's `speculative` section; `num_speculative_tokens` is a chain.
            None: plain decoding.
        dtype: of weights, activations and caches: float32, bfloat16 or float16.
        mesh: sizes of the axes `data`, `fsdp` and `tensor`; absent ones are 1.
        max_model_len: longest prompt and answer together; None: the model's own limit.
        batch_size: rows of a batch at most. Fewer requests run in a smaller one, unless a larger one is compiled
            already.
        prefill_chunk: prompt tokens in one pass.
        compilation_cache: a folder that keeps compiled programs between runs.
        progress: show bars while loading.

    Raises:
        EagleError: a checkpoint, head, mesh or value that cannot be used; the message says what to do.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        mesh: Mapping[str, int] | None = None,
        max_model_len: int | None = None,
        batch_size: int = 1,
        prefill_chunk: int = 512,
        compilation_cache: str | None = None,
        progress: bool = False,
    ):
        here = Path.cwd()
        if not isinstance(model, str | os.PathLike):
            raise RequestError(f"model: expected a path, a hub id or package:<package>/<file>, got {model!r}")
        for name, given in (("speculative_config", speculative_config), ("mesh", mesh)):
            if given is not None and not isinstance(given, Mapping):
                raise RequestError(f"{name}: expected a mapping of keys to values, got {given!r}")
        speculative = None if speculative_config is None else dict(speculative_config)
        if speculative and isinstance(speculative.get("model"), os.PathLike):
            speculative["model"] = os.fspath(speculative["model"])
        if speculative and isinstance(speculative.get("model"), str):
            speculative["model"] = resolve_model(speculative["model"], "speculative_config.model", here)
        config = parse(
            InferConfig,
            dict(
                model=resolve_model(os.fspath(model), "model", here),
                dtype=dtype,
                max_model_len=max_model_len,
                speculative=speculative,
                mesh=dict(mesh or {}),
                batch_size=batch_size,
                prefill_chunk=prefill_chunk,
                compilation_cache=compilation_cache,
            ),
        )
        self._setup(config, progress)

    @classmethod
    def from_config(cls, config: InferConfig, *, progress: bool = False) -> LLM:
        """An LLM from a loaded config file."""
        llm = cls.__new__(cls)
        llm._setup(config, progress)
        return llm

    @classmethod
    def of(
        cls,
        loaded: LoadedTarget,
        mesh: Mesh,
        drafter: Drafter,
        drafter_params: Any,
        *,
        max_model_len: int,
        batch_size: int,
        prefill_chunk: int = 512,
    ) -> LLM:
        """An LLM from what is loaded already, without a tokenizer: prompts are token ids."""
        llm = cls.__new__(cls)
        llm.max_model_len = max_model_len
        llm.batch_size = batch_size
        llm.prefill_chunk = prefill_chunk
        llm.mesh = mesh
        llm.tokenizer = None
        llm.loaded = loaded
        llm._use(drafter, drafter_params)
        return llm

    def _setup(self, config: InferConfig, progress: bool) -> None:
        if config.compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        path = resolve_checkpoint(config.model)
        shape = MeshShape(**config.mesh.model_dump())
        model = read_target_config(path)
        check_mesh(shape, model, config.batch_size)
        self.max_model_len = config.max_model_len or model.context_length
        if self.max_model_len > model.context_length:
            raise RequestError(
                f"max_model_len {self.max_model_len} is beyond the model's context of {model.context_length}"
            )
        self.batch_size = config.batch_size
        self.prefill_chunk = config.prefill_chunk
        self.mesh = make_mesh(shape)
        self.tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(path)
        with loading_bar(progress, "Loading the target") as report:
            self.loaded: LoadedTarget = load_target(path, config.dtype, self.mesh, report)
        if config.speculative is None:
            self._use(NoDraft(), None)
        else:
            self._use(*self._load_drafter(config.speculative, shape, progress))

    def _load_drafter(self, spec: SpeculativeConfig, shape: MeshShape, progress: bool) -> tuple[Drafter, Any]:
        tree = build_tree(spec.tree, spec.method)
        with loading_bar(progress, "Loading the head") as report:
            head = load_head(
                resolve_checkpoint(spec.model),
                self.loaded,
                spec.method,
                self.mesh,
                spec.taps,
                spec.head_overrides,
                report,
            )
        check_mesh(replace(shape, fsdp=1), head.config.model, self.batch_size, "the head")
        if tree.max_rank > head.config.draft_vocab_size:
            raise RequestError(
                f"the tree takes the {tree.max_rank} best tokens of a node, and the head knows "
                f"{head.config.draft_vocab_size}; take fewer"
            )
        drafter = EagleDrafter(
            head.functional, head.config, tree, spec.draft_sampling == "coupled", self.loaded.target.dtype
        )
        return drafter, head.params

    def _use(self, drafter: Drafter, drafter_params: Any) -> None:
        self.drafter = drafter
        self.params = DecodeParams(self.loaded.params, drafter_params)
        self._generators: dict[int | None, Generator] = {}
        self._warm: set[_Shapes] = set()

    def replace_head(self, drafter_params: Any) -> None:
        """Goes on with other parameters of the same drafter; nothing is compiled anew."""
        self.params = DecodeParams(self.loaded.params, drafter_params)

    def baseline(self) -> LLM:
        """The same target without speculation; the weights are shared."""
        llm = object.__new__(LLM)
        llm.__dict__.update(self.__dict__)
        llm._use(NoDraft(), None)
        return llm

    # ---------------------------------------------------------------- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, in batches of `batch_size` rows.

        Args:
            prompts: texts, lists of token ids or `{"prompt_token_ids": […]}`.
            params: one for all, or one for each.

        Raises:
            RequestError: an empty or too long prompt, or a token id out of range. Nothing has run then.
        """
        requests, rows = self._rows(prompts, params)
        answers: list[list[CompletionOutput]] = [[] for _ in requests]
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            for row, output in zip(batch, self._answer(batch), strict=True):
                answers[row.request].append(output)
        return [
            RequestOutput(text, token_ids, outputs)
            for (text, token_ids), outputs in zip(requests, answers, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        given = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str) else [None]
        conversations: list[Any] = [given] if given and isinstance(given[0], Mapping) else given
        for conversation in conversations:
            if not isinstance(conversation, list | tuple) or not all(
                isinstance(m, Mapping) for m in conversation
            ):
                raise RequestError(
                    'expected a list of messages such as {"role": "user", "content": "Hi"}, or a list of such lists; '
                    f"got {messages!r:.80}"
                )
        prompts = [{"prompt_token_ids": self.apply_chat_template(c)} for c in conversations]
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Answers one prompt, piece by piece as it comes."""
        _, rows = self._rows([prompt], params)
        if len(rows) != 1:
            raise RequestError(f"a stream has one answer, n is {rows[0].params.n}")
        return self._stream(rows[0])

    def warm_up(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Compiles what `generate` would run for these requests; costs nothing where that is done already."""
        _, rows = self._rows(prompts, params)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            shapes = self._shapes(batch)
            if shapes not in self._warm:
                generator, state, sampling, _ = self._start(batch)
                jax.block_until_ready(generator.run(self.params, state, sampling, max_steps=1))

    def apply_chat_template(self, messages: Messages, **template_options: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Args:
            template_options: variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: the model has no tokenizer or no chat template.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError("this model has no chat template; give a prompt as text or as token ids")
        encoded = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, return_dict=True, **template_options
        )
        return list(encoded["input_ids"])

    def _rows(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[tuple[str | None, list[int]]], list[_Row]]:
        if not isinstance(prompts, str | Mapping | Sequence | np.ndarray):
            raise RequestError(f"expected a prompt or a list of prompts, got {prompts!r:.80}")
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        elif len(prompts) and isinstance(prompts[0], int | np.integer):
            prompts = [prompts]  # type: ignore[assignment]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(params)} sampling parameters; give one or as many"
            )
        if wrong := [p for p in params if not isinstance(p, SamplingParams)]:
            raise RequestError(f"expected SamplingParams, got {wrong[0]!r:.80}")
        if self.tokenizer is None and any(p.stop for p in params):
            raise RequestError("this model has no tokenizer to find stop texts with; give stop_token_ids")
        requests = [self._tokenize(prompt) for prompt in prompts]  # type: ignore[arg-type]
        rows = [
            _Row(i, sample, requests[i][1], own) for i, own in enumerate(params) for sample in range(own.n)
        ]
        return requests, rows

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give prompts as token ids")
            text, token_ids = prompt, list(self.tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise RequestError(f"a prompt has keys {sorted(prompt)}; expected prompt_token_ids")
            ids = prompt["prompt_token_ids"]
            if not isinstance(ids, Sequence | np.ndarray):
                raise RequestError(f"prompt_token_ids must be a list of token ids, got {ids!r:.80}")
            token_ids = list(ids)
        elif isinstance(prompt, Sequence | np.ndarray):
            token_ids = list(prompt)
        else:
            raise RequestError(f"a prompt is a text or a list of token ids, got {prompt!r}")
        vocab_size = self.loaded.target.config.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        wrong = [t for t in token_ids if not _is_token_id(t) or not 0 <= t < vocab_size]
        if wrong:
            raise RequestError(f"token id {wrong[0]!r} is outside the vocabulary 0 … {vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len {self.max_model_len} leaves no room "
                "for an answer"
            )
        return text, [int(t) for t in token_ids]

    # ---------------------------------------------------------------- batches

    def _shapes(self, rows: Sequence[_Row]) -> _Shapes:
        """The shapes that a batch runs in. They come from few sizes, so that few programs are compiled."""
        longest = max(len(row.token_ids) for row in rows)
        chunk = min(_power_of_two(longest, SMALLEST_CHUNK), self.prefill_chunk)
        need = max(len(row.token_ids) + self._max_new_tokens(row) for row in rows)
        capacity = min(_bucket(need, SMALLEST_CAPACITY), self.max_model_len)
        capacity = max(capacity, -(-longest // chunk) * chunk)  # whole chunks
        # Room for any tree, so that attention is the same, to the bit, with and without one.
        capacity = -(-(capacity + self.drafter.max_depth + 1) // 64) * 64
        asked = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        num_logprobs = None
        if asked:
            num_logprobs = _power_of_two(max(asked), 1) if any(asked) else 0
            num_logprobs = min(num_logprobs, self.loaded.target.config.vocab_size)
        widest = max(len(self._stop_ids(row.params)) for row in rows)
        full = _Shapes(self.batch_size, capacity, chunk, _power_of_two(widest, 4), num_logprobs)
        if self.mesh.size > 1:  # it divides batches of the size that it was checked for
            return full
        # Few requests run in a small batch, or in the smallest that programs have been compiled for already.
        small = replace(full, rows=min(_power_of_two(len(rows), 1), self.batch_size))
        warm = [s for s in self._warm if s.rows >= small.rows and replace(s, rows=small.rows) == small]
        return min(warm, key=lambda shapes: shapes.rows, default=small)

    def _start(self, rows: Sequence[_Row]) -> tuple[Generator, DecodeState, RowSampling, float]:
        """Prefills a batch."""
        shapes = self._shapes(rows)
        self._check_fits(shapes)
        history = np.zeros((shapes.rows, shapes.capacity), np.int32)
        lengths = np.zeros((shapes.rows,), np.int32)
        for i, row in enumerate(rows):
            history[i, : len(row.token_ids)] = row.token_ids
            lengths[i] = len(row.token_ids)
        sampling = self._sampling(rows, shapes)
        if shapes.num_logprobs not in self._generators:
            spec = Decoding(self.loaded.target, self.drafter, shapes.num_logprobs)
            generator = Generator(spec, self.mesh, TARGET_RULES, self.loaded.target.dtype)
            self._generators[shapes.num_logprobs] = generator
        generator = self._generators[shapes.num_logprobs]
        begin = time.perf_counter()
        state = generator.start(self.params, history, lengths, sampling, shapes.chunk)
        jax.block_until_ready(state.lengths)
        self._warm.add(shapes)
        return generator, state, sampling, time.perf_counter() - begin

    def _check_fits(self, shapes: _Shapes) -> None:
        model = self.loaded.target.config
        layers = model.num_layers + (self.drafter.max_depth > 0)  # a head has one
        rows = 2 * layers * shapes.rows * shapes.capacity * model.num_kv_heads * model.head_dim
        # Beside the cache, what is largest: logits and noise of a step, float32; a chunk's scores and activations.
        nodes = self.drafter.num_nodes + self.drafter.max_depth + 1
        step = 4 * shapes.rows * nodes * model.vocab_size
        wide = 3 * model.intermediate_size + model.num_heads * shapes.chunk
        chunk = 4 * shapes.rows * shapes.chunk * wide
        weights = sum(p.addressable_shards[0].data.nbytes for p in self.loaded.params.values())
        itemsize = np.dtype(self.loaded.target.dtype).itemsize
        what = f"batch_size {shapes.rows} x {shapes.capacity} tokens"
        check_fits(self.mesh, weights, rows * itemsize, max(step, chunk), what)

    def _max_new_tokens(self, row: _Row) -> int:
        return min(row.params.max_new_tokens, self.max_model_len - len(row.token_ids))

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        own = () if params.ignore_eos else self.loaded.target.config.eos_token_ids
        return [*params.stop_token_ids, *own]

    def _sampling(self, rows: Sequence[_Row], shapes: _Shapes) -> RowSampling:
        stops, width = [self._stop_ids(row.params) for row in rows], shapes.stop_ids
        padding = shapes.rows - len(rows)

        def column(values: Iterable[float], fill: float, dtype: Any) -> Any:  # on the host; jit places it
            return np.asarray([*values, *[fill] * padding], dtype)

        params = [row.params for row in rows]
        return RowSampling(
            temperature=column((p.temperature for p in params), 0.0, np.float32),
            top_p=column((p.top_p for p in params), 1.0, np.float32),
            top_k=column((p.top_k for p in params), 0, np.int32),
            min_p=column((p.min_p for p in params), 0.0, np.float32),
            repetition_penalty=column((p.repetition_penalty for p in params), 1.0, np.float32),
            seed=column((p.seed for p in params), 0, np.uint32),
            sample=column((row.sample for row in rows), 0, np.int32),
            min_new_tokens=column((p.min_new_tokens for p in params), 0, np.int32),
            max_new_tokens=column((self._max_new_tokens(row) for row in rows), 1, np.int32),
            stop_ids=np.asarray(  # type: ignore[arg-type]
                [ids + [-1] * (width - len(ids)) for ids in stops] + [[-1] * width] * padding, np.int32
            ),
        )

    def _answer(self, rows: Sequence[_Row]) -> list[CompletionOutput]:
        generator, state, sampling, prefill_seconds = self._start(rows)
        texts = [Detokenizer(self.tokenizer, row.params.stop, row.params.min_new_tokens) for row in rows]
        begin = time.perf_counter()
        if not any(row.params.stop for row in rows):
            state = generator.run(self.params, state, sampling)
            jax.block_until_ready(state.lengths)
            decode_seconds = time.perf_counter() - begin
            return [
                self._output(row, _Read(state, i), None, prefill_seconds, decode_seconds)
                for i, row in enumerate(rows)
            ]
        pushed = [0] * len(rows)
        cancelled = np.zeros(state.history.shape[0], bool)
        while True:
            finish = np.asarray(state.finish)
            for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
                if row.params.stop and text.stopped_by is None:
                    pushed[i] += text.push(_Read(state, i).text_ids[pushed[i] :])
                    cancelled[i] = text.stopped_by is not None
            if not np.any((finish == RUNNING)[: len(rows)] & ~cancelled[: len(rows)]):
                break
            state = generator.run(self.params, state, sampling, STOP_TEXT_STEPS, cancelled)
        decode_seconds = time.perf_counter() - begin
        return [
            self._output(row, _Read(state, i), texts[i], prefill_seconds, decode_seconds)
            for i, row in enumerate(rows)
        ]

    def _stream(self, row: _Row) -> Iterator[StreamChunk]:
        generator, state, sampling, prefill_seconds = self._start([row])
        text = Detokenizer(self.tokenizer, row.params.stop, row.params.min_new_tokens)
        begin, pushed = time.perf_counter(), 0
        while True:
            read = _Read(state, 0)
            end = pushed + text.push(read.text_ids[pushed:])
            if text.stopped_by is None:
                end = len(read.token_ids)
            finished = text.stopped_by is not None or read.finish != RUNNING
            output = None
            if finished:
                decode_seconds = time.perf_counter() - begin
                output = self._output(row, read, text, prefill_seconds, decode_seconds)
                new_text = text.release(output.text)
            else:
                new_text = text.release()
            span = slice(pushed, end)
            yield StreamChunk(new_text, read.token_ids[span], read.accepted[span], finished, output)
            if finished:
                return
            pushed = end
            state = generator.run(self.params, state, sampling, STREAM_STEPS)

    def _output(
        self, row: _Row, read: _Read, text: Detokenizer | None, prefill_seconds: float, decode_seconds: float
    ) -> CompletionOutput:
        ids, reason, accept_lengths = read.token_ids, "length", read.accept_lengths
        stop_reason: str | int | None = None
        if text is not None and text.stopped_by is not None:
            ids, reason, stop_reason = ids[: len(text.token_ids)], "stop", text.stopped_by
            answer = text.text
            accept_lengths = _cut(accept_lengths, len(ids) - 1)
        else:
            if read.finish == STOPPED:
                reason = "stop"
                own = self.loaded.target.config.eos_token_ids
                stop_reason = None if ids[-1] in own and not row.params.ignore_eos else ids[-1]
            answer = decode(self.tokenizer, read.text_ids)
        return CompletionOutput(
            index=row.sample,
            text=answer,
            token_ids=ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if row.params.logprobs is None else read.logprobs(len(ids), row.params.logprobs),
            accept_lengths=accept_lengths,
            accepted=read.accepted[: len(ids)],
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
        )


class _Read:
    """One row of a finished or paused state, on the host."""

    def __init__(self, state: DecodeState, row: int):
        self.state, self.row = state, row
        self.start = int(np.asarray(state.prompt_lengths)[row])
        self.end = int(np.asarray(state.lengths)[row])
        self.finish = int(np.asarray(state.finish)[row])

    @property
    def token_ids(self) -> list[int]:
        return np.asarray(self.state.history)[self.row, self.start : self.end].tolist()

    @property
    def text_ids(self) -> list[int]:
        """The tokens that the text is made of: all but a final stop token."""
        return self.token_ids[:-1] if self.finish == STOPPED else self.token_ids

    @property
    def accepted(self) -> list[bool]:
        return np.asarray(self.state.drafted)[self.row, self.start : self.end].tolist()

    @property
    def accept_lengths(self) -> list[int]:
        steps = int(np.asarray(self.state.steps)[self.row])
        return np.asarray(self.state.accept_lengths)[self.row, :steps].tolist()

    def logprobs(self, count: int, alternatives: int) -> list[dict[int, float]]:
        table = self.state.logprobs
        assert table is not None
        span = slice(self.start, self.start + count)
        ids = np.asarray(self.state.history)[self.row, span]
        chosen = np.asarray(table.chosen)[self.row, span]
        top_ids = np.asarray(table.top_ids)[self.row, span, :alternatives]
        top = np.asarray(table.top)[self.row, span, :alternatives]
        return [
            {int(ids[i]): float(chosen[i])}
            | {int(t): float(p) for t, p in zip(top_ids[i], top[i], strict=True)}
            for i in range(count)
        ]


def build_tree(config: TreeConfig, method: str) -> Tree:
    """The tree that a config describes; names of static trees resolve within the method.

    Raises:
        TreeError: it cannot be built.
    """
    if isinstance(config, ChainConfig):
        return StaticTree.chain(config.num_tokens)
    if isinstance(config, StaticConfig):
        return (
            named_paths(method, config.paths) if isinstance(config.paths, str) else StaticTree(config.paths)
        )
    return DynamicTree(config.total_tokens, config.depth, config.top_k)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _power_of_two(value: int, smallest: int) -> int:
    """The least smallest · 2^i that is no less than `value`."""
    size = smallest
    while size < value:
        size *= 2
    return size


def _bucket(value: int, smallest: int) -> int:
    """The least of smallest, 1.5 · smallest, 2 · smallest, 3 · smallest, … that is no less than `value`."""
    size = _power_of_two(value, smallest)
    return size * 3 // 4 if size > smallest and size * 3 // 4 >= value else size


def _cut(lengths: Sequence[int], total: int) -> list[int]:
    """The steps' lengths, cut where they add up to `total`."""
    kept: list[int] = []
    for length in lengths:
        if total <= 0:
            break
        kept.append(min(length, total))
        total -= length
    return kept

"""Whole generations on the device: prefill in chunks, then steps in one `lax.while_loop`.

The host starts a batch and reads its result; streaming runs the same loop a few steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.decoding.state import CANCELLED, RUNNING, DecodeState, Logprobs
from eagle_jax.decoding.step import DecodeParams, Decoding, prefill_chunk, step
from eagle_jax.models.kernels import kernels_for
from eagle_jax.parallel.sharding import Rules, shardings
from eagle_jax.sampling import RowSampling

UNLIMITED = np.iinfo(np.int32).max


class Generator:
    """The compiled functions of one decoding loop on one mesh.

    What is compiled depends on shapes alone: rows of the batch, capacity, chunk size. After one call
    with each, nothing compiles again.

    Args:
        spec: what to run.
        mesh, rules: where the state lives.
        dtype: of the target's KV cache.
    """

    def __init__(self, spec: Decoding, mesh: Mesh, rules: Rules, dtype: Any):
        self.spec = spec
        placed = shardings(_state_axes(spec), mesh, rules)
        self._init = jax.jit(partial(_init_state, spec, dtype), out_shardings=placed)
        self._prefill = jax.jit(
            partial(_for_mesh, mesh, prefill_chunk, spec),
            static_argnames="size",
            donate_argnames="state",
            out_shardings=placed,
        )
        self._run = jax.jit(
            partial(_for_mesh, mesh, _run, spec), donate_argnames="state", out_shardings=placed
        )

    def start(
        self,
        params: DecodeParams,
        history: np.ndarray,
        prompt_lengths: np.ndarray,
        sampling: RowSampling,
        chunk: int,
    ) -> DecodeState:
        """Prefills a batch and chooses every row's first token.

        Args:
            history: [B, S] prompts, padded on the right to the capacity S. S must hold the longest prompt
                rounded up to whole chunks, and the longest row plus the tree's depth + 1.
            prompt_lengths: [B]; 0 marks an unused row of the batch.
            chunk: prompt tokens in one pass.
        """
        state = self._init(history, prompt_lengths)
        for begin in range(0, int(prompt_lengths.max()), chunk):
            state = self._prefill(params, state=state, sampling=sampling, start=np.int32(begin), size=chunk)
        return state

    def run(
        self,
        params: DecodeParams,
        state: DecodeState,
        sampling: RowSampling,
        max_steps: int = UNLIMITED,
        cancelled: np.ndarray | None = None,
    ) -> DecodeState:
        """Steps until every row has ended, or `max_steps` times. Rows in `cancelled` [B] end at once."""
        if cancelled is None:
            cancelled = np.zeros(state.history.shape[0], bool)
        return self._run(
            params, state=state, sampling=sampling, max_steps=np.int32(max_steps), cancelled=cancelled
        )


def _for_mesh(mesh: Mesh, function: Callable[..., DecodeState], *args: Any, **kwargs: Any) -> DecodeState:
    with kernels_for(mesh):
        return function(*args, **kwargs)


def _init_state(
    spec: Decoding, dtype: Any, history: Int[Array, "B S"], prompt_lengths: Int[Array, " B"]
) -> DecodeState:
    B, S = history.shape
    model = spec.target.config
    zeros = jnp.zeros((B,), jnp.int32)
    rows = jnp.arange(B)[:, None]
    in_prompt = jnp.arange(S) < prompt_lengths[:, None]
    k = spec.num_logprobs
    return DecodeState(
        history=history.astype(jnp.int32),
        prompt_lengths=prompt_lengths,
        lengths=prompt_lengths,
        finish=jnp.where(prompt_lengths > 0, RUNNING, CANCELLED).astype(jnp.int32),
        steps=zeros,
        accept_lengths=jnp.zeros((B, S), jnp.int32),
        drafted=jnp.zeros((B, S), bool),
        presence=jnp.zeros((B, model.vocab_size), bool).at[rows, history].max(in_prompt),
        cache=ContiguousCache.zeros(model.num_layers, B, model.num_kv_heads, S, model.head_dim, dtype),
        drafter=spec.drafter.init_state(B, S),
        logprobs=None
        if k is None
        else Logprobs(jnp.zeros((B, S)), jnp.zeros((B, S, k), jnp.int32), jnp.zeros((B, S, k))),
    )


def _state_axes(spec: Decoding) -> Any:
    """`_init_state`'s pytree with the logical axes of each leaf in its place."""
    row, model = ("batch", None), spec.target.config
    cache = (("batch", "kv_heads", None, None),) * model.num_layers
    table = ("batch", None, None)
    axes: Any = dict(
        history=row,
        prompt_lengths=("batch",),
        lengths=("batch",),
        finish=("batch",),
        steps=("batch",),
        accept_lengths=row,
        drafted=row,
        presence=row,
        cache=ContiguousCache(cache, cache),  # type: ignore[arg-type]
        drafter=spec.drafter.state_axes(),
        logprobs=None if spec.num_logprobs is None else Logprobs(row, table, table),  # type: ignore[arg-type]
    )
    return DecodeState(**axes)


def _run(
    spec: Decoding,
    params: DecodeParams,
    state: DecodeState,
    sampling: RowSampling,
    max_steps: Int[Array, ""],
    cancelled: Bool[Array, " B"],
) -> DecodeState:
    state = replace(state, finish=jnp.where(cancelled & state.running, CANCELLED, state.finish))

    def goes_on(carry):
        count, state = carry
        return (count < max_steps) & jnp.any(state.running)

    def body(carry):
        count, state = carry
        return count + 1, step(spec, params, state, sampling)

    return jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]

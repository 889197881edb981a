"""Where a speculative step's time goes, and what speculation gains, all in one process and interleaved.

    python benchmarks/speculation.py --config infer-smollm2-eagle3.1 --prompts mt_bench.jsonl [key=value …]

Prints the plain step t1, the verification pass t_N and the draft (propose and absorb), each jitted alone at the
shapes of the loop; the step as the loop runs it; the share of the step that none of them explains; τ and the
speed-up over plain decoding of the same prompts, beside the ceiling τ·t1 / (t_N + draft). With --other-dtype plain
decoding in that dtype runs too, and the speed-up is over the faster of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax import LLM, SamplingParams
from eagle_jax.config import load_config
from eagle_jax.decoding.step import DecodeParams
from eagle_jax.drafters.protocol import Context, Seen
from eagle_jax.models.kernels import kernels_for
from eagle_jax.sampling import gumbel_noise


def read_prompts(path: Path, count: int) -> list[str]:
    """First turns of a JSONL file of `turns` or `prompt` rows."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows[:count]]


REPEAT = 10  # runs of a part in one call, so that the call itself does not count


def pieces(llm: LLM, prompt: Any, params: SamplingParams) -> dict[str, Callable[[], Any]]:
    """The parts of one step: each a function jitted alone, which runs it `REPEAT` times in a loop on the device."""
    _, rows = llm._rows([prompt], params)
    generator, state, sampling, _ = llm._start(rows)
    state = generator.run(llm.params, state, sampling, max_steps=8)
    drafter, target = llm.drafter, llm.loaded.target
    vocab_size = target.config.vocab_size

    def repeated(part: Callable[..., Any]) -> Callable[..., Any]:
        def loop(*args: Any) -> Any:
            with kernels_for(llm.mesh):
                # A run needs the result of the one before it, in a way that changes nothing, so none can be left out.
                first = part(jnp.int32(0), *args)
                return jax.lax.fori_loop(1, REPEAT, lambda _, last: part(_nothing(last), *args), first)

        return jax.jit(loop)

    def propose(zero: Any, params: DecodeParams, state: Any, sampling: Any) -> Any:
        lengths = state.lengths + zero
        positions = lengths[:, None] + jnp.arange(drafter.max_depth + 1)
        noise = gumbel_noise(sampling, positions, vocab_size)
        hidden = jax.tree.map(lambda x: x + zero.astype(x.dtype) if x.ndim == 2 else x, state.drafter)
        context = Context(state.history, lengths, sampling, noise, state.presence)
        return drafter.propose(params.drafter, hidden, context)[1]

    def verify(zero: Any, params: DecodeParams, state: Any, tree: Any) -> Any:
        model = target.bind(params.target)
        start = state.lengths - 1
        tokens = tree.tokens + zero
        out = model(tokens, start[:, None] + tree.depths, state.cache, start, tree.mask, drafter.taps)
        return jnp.argmax(model.logits(out.hidden), axis=-1), out.taps, out.rows

    def absorb(zero: Any, params: DecodeParams, state: Any, taps: Any) -> Any:
        count = jnp.ones_like(state.lengths)
        seen = Seen(state.history + zero, state.lengths - 1, count, taps[:, : drafter.max_depth + 1])
        return drafter.absorb(params.drafter, state.drafter, seen).hidden

    run_propose, run_verify, run_absorb = map(repeated, (propose, verify, absorb))
    tree = run_propose(llm.params, state, sampling)
    _, taps, _ = run_verify(llm.params, state, tree)
    return {
        "propose": lambda: run_propose(llm.params, state, sampling),
        "verify": lambda: run_verify(llm.params, state, tree),
        "absorb": lambda: run_absorb(llm.params, state, taps),
    }


def _nothing(result: Any) -> jax.Array:
    """Zero, in a way that the compiler cannot foresee."""
    first = jax.tree.leaves(result)[0]
    return jnp.minimum(jnp.nan_to_num(jnp.abs(first.ravel()[0]).astype(jnp.float32)), 0.0).astype(jnp.int32)


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of one run of each part, measured in turns."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - begin) / REPEAT * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="infer-smollm2-eagle3.1")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns or prompt rows")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of the parts' timings")
    parser.add_argument("--other-dtype", help="plain decoding in this dtype too")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)

    config = load_config(args.config, args.overrides)
    params = SamplingParams(**config.sampling.model_dump())
    llm = LLM.from_config(config)
    contenders = {"speculative": llm, "plain": llm.baseline()}
    if args.other_dtype:
        other = config.model_copy(update=dict(dtype=args.other_dtype, speculative=None))
        contenders[f"plain {args.other_dtype}"] = LLM.from_config(other)
    messages = [[{"role": "user", "content": text}] for text in read_prompts(args.prompts, args.count)]
    prompts = [{"prompt_token_ids": llm.apply_chat_template(m)} for m in messages]

    parts = medians(
        pieces(llm, prompts[0], params)
        | {"plain step": pieces(contenders["plain"], prompts[0], params)["verify"]},
        args.rounds,
    )
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    steps: dict[str, int] = dict.fromkeys(contenders, 0)
    tokens: dict[str, int] = dict.fromkeys(contenders, 0)
    identical = 0
    for one in contenders.values():
        one.warm_up(prompts, params)
    for prompt in prompts:
        texts = {}
        for name, one in contenders.items():
            output = one.generate([prompt], params)[0].outputs[0]
            seconds[name].append(output.decode_seconds)
            steps[name] += len(output.accept_lengths)
            tokens[name] += sum(output.accept_lengths)
            texts[name] = output.token_ids
        identical += texts["speculative"] == texts["plain"]

    tau = tokens["speculative"] / steps["speculative"]
    step = sum(seconds["speculative"]) / steps["speculative"] * 1e3
    known = parts["propose"] + parts["verify"] + parts["absorb"]
    per_token = {name: sum(seconds[name]) / tokens[name] * 1e3 for name in contenders}
    best_plain = min(value for name, value in per_token.items() if name != "speculative")
    print(
        f"{len(prompts)} prompts, {config.dtype}, tree of {llm.drafter.num_nodes} nodes, T = {params.temperature}"
    )
    for name, value in parts.items():
        print(f"  {name:<12} {value:8.2f} ms")
    print(f"  step in loop {step:8.2f} ms; not explained by its parts: {1 - known / step:.1%}")
    for name, value in per_token.items():
        print(f"  {name:<16} {value:8.2f} ms a token, {1e3 / value:6.1f} tokens/s")
    print(f"  mean acceptance length {tau:.3f}; identical to plain: {identical}/{len(prompts)}")
    print(f"  speed-up over the faster plain decoding {best_plain / per_token['speculative']:.3f}")
    print(f"  ceiling τ·t1/(t_N + draft) {tau * parts['plain step'] / known:.3f}")


if __name__ == "__main__":
    main()

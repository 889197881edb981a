"""How near decoding comes to the speed of a device's memory, at the shapes of a large model, with random weights.

    python benchmarks/roofline.py --bandwidth 4.3e12                      Llama-3.1-8B in bfloat16 on one H200
    python benchmarks/roofline.py --layers 2 --context 64 --bandwidth 20e9   a smaller one, anywhere

Prints the time of a plain decoding step, of a verification pass over the tree alone, and of a whole speculative step
with an EAGLE-3 head, each beside the least time in which its weights and its cache can be read. All steps run in one
loop on the device; transfers between host and device are forbidden meanwhile, so the script fails if a step needs one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.step import DecodeParams, Decoding
from eagle_jax.draft_tree import DynamicTree
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.eagle_drafter import EagleDrafter, EagleParams
from eagle_jax.drafters.head_config import read_head_config
from eagle_jax.drafters.no_draft import NoDraft
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Functional, ParameterSpec
from eagle_jax.models.kernels import kernels_for
from eagle_jax.parallel.mesh import MeshShape, make_mesh
from eagle_jax.parallel.sharding import HEAD_RULES, TARGET_RULES, Rules, shardings
from eagle_jax.sampling import RowSampling

LLAMA_3_1_8B = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    eos_token_id=128001,
)
DRAFT_VOCABULARY = 32000


def random_params(specs: Mapping[str, ParameterSpec], mesh: Any, rules: Rules, seed: int) -> dict[str, Any]:
    """Weights made on the device, one at a time."""
    placed: Any = shardings({name: spec.axes for name, spec in specs.items()}, mesh, rules)

    def make(key: Any, spec: ParameterSpec) -> Any:
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            return jnp.zeros(spec.shape, spec.dtype)
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, spec.dtype)
        return jax.random.normal(key, spec.shape, spec.dtype) * spec.shape[-1] ** -0.5

    keys = jax.random.split(jax.random.key(seed), len(specs))
    return {
        name: jax.jit(make, static_argnums=1, out_shardings=placed[name])(key, spec)
        for (name, spec), key in zip(specs.items(), keys, strict=True)
    }


def greedy(rows: int, tokens: int) -> RowSampling:
    """Sampling parameters of rows that never stop by themselves."""

    def full(value: Any, dtype: Any) -> jax.Array:
        return jnp.full((rows,), value, dtype)

    return RowSampling(
        temperature=full(0, jnp.float32),
        top_p=full(1, jnp.float32),
        top_k=full(0, jnp.int32),
        min_p=full(0, jnp.float32),
        repetition_penalty=full(1, jnp.float32),
        seed=full(0, jnp.uint32),
        sample=full(0, jnp.int32),
        min_new_tokens=full(0, jnp.int32),
        max_new_tokens=full(tokens, jnp.int32),
        stop_ids=jnp.full((rows, 1), -1, jnp.int32),
    )


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median of a few timings, after a first call that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Builds the model and times its steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-config", type=Path, help="config.json of a target (default: Llama-3.1-8B)")
    parser.add_argument("--layers", type=int, help="fewer layers than the config says")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens of every prompt")
    parser.add_argument("--nodes", type=int, default=60, help="of the tree, its root included")
    parser.add_argument("--depth", type=int, default=5, help="levels of the tree after the first")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--steps", type=int, default=32, help="steps in one run of the loop")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, required=True, help="of the device's memory, bytes/s")
    args = parser.parse_args(argv)

    described = json.loads(args.model_config.read_text()) if args.model_config else dict(LLAMA_3_1_8B)
    if args.layers:
        described["num_hidden_layers"] = args.layers
    config = ModelConfig.from_hf(described)
    target = Target(config, args.dtype)
    mesh = make_mesh(MeshShape())
    taps = [min(2, config.num_layers - 1), config.num_layers // 2, max(config.num_layers - 3, 0)]
    head_json = described | dict(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=min(DRAFT_VOCABULARY, config.vocab_size),
        eagle_aux_hidden_state_layer_ids=taps,
    )
    names = frozenset({"layers.0.hidden_norm.weight", "fc.weight", "d2t"})
    head_config = read_head_config(head_json, names, config, "eagle3", taps=tuple(taps))
    head = Functional.of(lambda: Eagle3Head(head_config, jnp.dtype(args.dtype)))
    tree = DynamicTree(args.nodes, args.depth, args.top_k)

    weights = random_params(target.functional.specs, mesh, TARGET_RULES, seed=0)
    head_weights = random_params(head.specs, mesh, HEAD_RULES, seed=1)
    output = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    drafters: dict[str, tuple[Any, Any]] = {
        "plain": (NoDraft(), None),
        "speculative": (
            EagleDrafter(head, head_config, tree, True, args.dtype),
            EagleParams(head_weights, weights["embed_tokens.weight"], output),
        ),
    }

    tokens = (args.steps + 2) * (args.depth + 2) * (args.rounds + 2)
    capacity = -(-(args.context + tokens + args.depth + 2) // 128) * 128
    history = np.zeros((args.batch, capacity), np.int32)
    history[:, : args.context] = np.random.default_rng(0).integers(0, config.vocab_size, args.context)
    lengths = np.full(args.batch, args.context, np.int32)
    sampling = greedy(args.batch, tokens)

    # One token's pass reads every weight but the embeddings' table, unless the head is that table, and the cache.
    table = weights["embed_tokens.weight"].nbytes if "lm_head.weight" in weights else 0
    read = sum(w.nbytes for w in weights.values()) - table
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(args.dtype).itemsize
    cache = args.batch * args.context * row
    drafting = sum(w.nbytes for name, w in head_weights.items() if not name.startswith("lm_head"))
    drafting += (args.depth + 1) * head_weights["lm_head.weight"].nbytes
    drafting += args.depth * sum(w.nbytes for n, w in head_weights.items() if n.startswith("layers."))

    print(
        f"{jax.devices()[0].device_kind}: {config.num_layers} layers, {args.dtype}, batch {args.batch}, context "
        f"{args.context}, tree of {args.nodes} nodes; weights {read / 1e9:.2f} GB, cache {cache / 1e9:.3f} GB a pass"
    )

    def report(name: str, seconds: float, nbytes: float) -> None:
        limit = nbytes / args.bandwidth
        print(
            f"  {name:<24}{seconds * 1e3:9.3f} ms; limit {limit * 1e3:8.3f} ms; "
            f"{nbytes / seconds / args.bandwidth:6.1%} of {args.bandwidth / 1e12:.3g} TB/s"
        )

    trees = {}
    for name, (drafter, drafter_params) in drafters.items():
        generator = Generator(Decoding(target, drafter), mesh, TARGET_RULES, args.dtype)
        params = DecodeParams(weights, drafter_params)
        state = generator.start(params, history, lengths, sampling, min(512, args.context))
        limit, nobody = jnp.int32(args.steps), jnp.zeros(args.batch, bool)
        holder = [generator._run(params, state=state, sampling=sampling, max_steps=limit, cancelled=nobody)]

        def steps(generator=generator, params=params, holder=holder, limit=limit, nobody=nobody) -> Any:
            # The state is given away to each run, and comes back from it.
            with jax.transfer_guard("disallow"):
                holder[0] = generator._run(
                    params, state=holder[0], sampling=sampling, max_steps=limit, cancelled=nobody
                )
            return holder[0].lengths

        seconds = median_seconds(steps, args.rounds) / args.steps
        if bool(jnp.any(holder[0].finish != 0)):
            raise SystemExit("a row ended before the timing did; give fewer --rounds or --steps")
        report(f"{name} step", seconds, read + cache + (0 if name == "plain" else drafting))
        trees[name] = (drafter, holder[0])

    # The verification pass alone, at the same shapes: a tree of that size, `steps` times in one loop.
    drafter, state = trees["speculative"]
    N = args.nodes
    nodes = jnp.arange(N, dtype=jnp.int32)
    depths = jnp.minimum(nodes, args.depth + 1)
    mask = jnp.broadcast_to(nodes[:, None] >= nodes[None, :], (args.batch, N, N))

    def verify(params: Any, state: Any) -> Any:
        with kernels_for(mesh):
            model, start = target.bind(params), state.lengths - 1

            def once(_: Any, tokens: Any) -> Any:
                out = model(tokens, start[:, None] + depths, state.cache, start, mask, drafter.taps)
                return jnp.argmax(model.logits(out.hidden), axis=-1).astype(jnp.int32)

            return jax.lax.fori_loop(0, args.steps, once, jnp.zeros((args.batch, N), jnp.int32))

    run = jax.jit(verify)
    seconds = median_seconds(lambda: run(weights, state), args.rounds) / args.steps
    report(f"pass over {N} nodes", seconds, read + cache)


if __name__ == "__main__":
    main()

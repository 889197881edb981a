"""Our decoding, plain and speculative, against `generate` of transformers, on the same prompts in one run.

    python benchmarks/against_transformers.py --prompts mt_bench.jsonl [--config infer-smollm2-eagle3.1] [key=value …]

Needs the extra `test` (torch). transformers runs in float32 with its KV cache, from the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from eagle_jax import LLM, SamplingParams
from eagle_jax.config import load_config
from eagle_jax.convert import convert


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="infer-smollm2-eagle3.1")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns or prompt rows")
    parser.add_argument("--count", type=int, default=5, help="prompts")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)

    config = load_config(args.config, args.overrides)
    llm = LLM.from_config(config)
    # One length for all: transformers is timed for as many tokens.
    params = SamplingParams(temperature=0.0, max_new_tokens=config.sampling.max_new_tokens, ignore_eos=True)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()][: args.count]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    prompts = [llm.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    baseline = llm.baseline()

    with tempfile.TemporaryDirectory() as folder:
        convert(config.model, Path(folder) / "model", "hf", dtype="float32")
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32
        )
    for one in (llm, baseline):
        one.warm_up([{"prompt_token_ids": p} for p in prompts], params)

    seconds: dict[str, list[float]] = {"transformers": [], "plain": [], "speculative": []}
    same, lengths = 0, []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        prefill = 0.0
        for tokens in (1, params.max_new_tokens):  # the time of one token is that of the prefill
            begin = time.perf_counter()
            reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
            )
            elapsed = time.perf_counter() - begin
            prefill = elapsed if tokens == 1 else prefill
        seconds["transformers"].append((elapsed - prefill) / (params.max_new_tokens - 1))
        outputs = {}
        for name, one in (("plain", baseline), ("speculative", llm)):
            outputs[name] = one.generate([prompt], params)[0].outputs[0]
            seconds[name].append(1 / outputs[name].tokens_per_second)
        same += outputs["plain"].token_ids == outputs["speculative"].token_ids
        lengths += outputs["speculative"].accept_lengths

    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{len(prompts)} prompts x {params.max_new_tokens} tokens, ours in {config.dtype}, medians over prompts"
    )
    for name, value in median.items():
        print(
            f"  {name:<13}{value * 1e3:8.1f} ms a token{median['transformers'] / value:8.2f} x transformers"
        )
    print(
        f"  mean acceptance length {sum(lengths) / len(lengths):.3f}; identical to plain {same}/{len(prompts)}"
    )


if __name__ == "__main__":
    main()

"""Random models small enough to compile in a moment: a target of two layers and an EAGLE-3 head for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from golden_data import mesh
from safetensors.numpy import save_file

from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.step import DecodeParams, Decoding
from eagle_jax.draft_tree import Tree
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.eagle_drafter import EagleDrafter, EagleParams
from eagle_jax.drafters.head_config import HeadConfig, read_head_config
from eagle_jax.drafters.no_draft import NoDraft
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Functional
from eagle_jax.parallel.sharding import TARGET_RULES

TAPS = [0, 1, 2]


@dataclass(frozen=True)
class Pair:
    """A target and a head of random weights.

    Attributes:
        target_json, head_json: their `config.json`.
        target_weights, head_weights: by our names.
    """

    target_json: dict
    head_json: dict
    target_weights: dict[str, np.ndarray]
    head_weights: dict[str, np.ndarray]

    @property
    def target(self) -> Target:
        return Target(ModelConfig.from_hf(self.target_json), "float32")

    @property
    def head_config(self) -> HeadConfig:
        names = frozenset(self.head_weights)
        return read_head_config(self.head_json, names, self.target.config, "eagle3", taps=tuple(TAPS))

    def decoding(self, tree: Tree | None, coupled: bool = True) -> tuple[Generator, DecodeParams]:
        """A new loop: nothing of it has been traced yet."""
        params = {name: jnp.asarray(value) for name, value in self.target_weights.items()}
        drafter, drafter_params = NoDraft(), None
        if tree is not None:
            config = self.head_config
            functional = Functional.of(lambda: Eagle3Head(config, jnp.float32))
            drafter = EagleDrafter(functional, config, tree, coupled, "float32")
            head = {name: jnp.asarray(value) for name, value in self.head_weights.items()}
            drafter_params = EagleParams(head, params["embed_tokens.weight"], params["lm_head.weight"])
        generator = Generator(Decoding(self.target, drafter), mesh(), TARGET_RULES, jnp.float32)
        return generator, DecodeParams(params, drafter_params)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Writes both as checkpoint folders."""
        for name, config, weights in (
            ("target", self.target_json, {f"model.{k}": v for k, v in self.target_weights.items()}),
            ("head", self.head_json, self.head_weights),
        ):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config))
            save_file(weights, folder / name / "model.safetensors")
        return folder / "target", folder / "head"


def random_pair(vocab_size: int, draft_vocab_size: int, seed: int = 0, max_positions: int = 256) -> Pair:
    """Logits spread over a few units, so that nothing is certain and nothing uniform.

    What the head says resembles the target: embeddings share a direction, which makes some tokens likelier than others
    everywhere, and the head reads the target's last state and has its output weights.
    """
    rng = np.random.default_rng(seed)
    config = dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=max_positions,
        eos_token_id=2,
    )
    head_json = config | dict(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=TAPS,
    )
    target = Target(ModelConfig.from_hf(config), "float32")
    names = frozenset({"layers.0.hidden_norm.weight", "fc.weight", "d2t"})
    own = read_head_config(head_json, names, target.config, "eagle3", taps=tuple(TAPS))
    functional = Functional.of(lambda: Eagle3Head(own, jnp.float32))

    def weights(specs):
        made = {}
        for name, spec in specs.items():
            if len(spec.shape) == 1:
                made[name] = (1 + 0.1 * rng.normal(size=spec.shape)).astype(np.float32)
            else:
                made[name] = (rng.normal(size=spec.shape) / np.sqrt(spec.shape[-1])).astype(np.float32)
        return made

    target_weights, head_weights = weights(target.functional.specs), weights(functional.specs)
    kept = np.sort(rng.choice(vocab_size, draft_vocab_size, replace=False))
    width = config["hidden_size"]
    target_weights["embed_tokens.weight"] += rng.normal(size=width).astype(np.float32) * 0.4
    head_weights["fc.weight"] = 0.1 * head_weights["fc.weight"]
    head_weights["fc.weight"][:, -width:] += np.eye(width, dtype=np.float32)
    head_weights["lm_head.weight"] = target_weights["lm_head.weight"][kept]
    head_weights["d2t"] = (kept - np.arange(draft_vocab_size)).astype(np.int32)
    return Pair(config, head_json, target_weights, head_weights)

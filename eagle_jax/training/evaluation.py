"""How good a head is: losses and accuracies on held-out data, and what its target accepts when it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax.drafters.eagle_drafter import EagleDrafter, EagleParams
from eagle_jax.llm import LLM, build_tree
from eagle_jax.loading import LoadedTarget
from eagle_jax.parallel.sharding import HEAD_RULES, shardings
from eagle_jax.sampling_params import SamplingParams
from eagle_jax.training.config import EvaluationSection
from eagle_jax.training.heads import TrainedHead
from eagle_jax.training.losses import Objective, Sums


def metrics_of(sums: Sums, regression: Any, all_rows: float, objective: Objective) -> dict[str, float]:
    """Figures from sums over rows.

    `accuracy_i`: share of the rows of step i at which the best draft token is the target's best. `acceptance_i`: mean
    of sum(min(p, q)) there, the chance that a sampled token is accepted. `simulated_acceptance_length`: 1 + the sum
    over i of the share of slots at which steps 0 to i are all right; tokens outside the draft vocabulary are misses.
    """
    loss, correct, accepted, rows, prefix, slots = (
        np.asarray(x, np.float64)
        for x in (sums.loss, sums.correct, sums.accepted, sums.rows, sums.prefix, sums.slots)
    )
    some = np.maximum(rows, 1.0)
    divisor = some if objective.denominator == "supervised" else np.full_like(some, all_rows)
    weights = objective.step_decay ** np.arange(len(loss))
    figures = {"loss": float(np.sum(weights * loss / divisor))}
    for i in range(len(loss)):
        figures[f"accuracy_{i}"] = float(correct[i] / some[i])
    for i in range(len(loss)):
        figures[f"acceptance_{i}"] = float(accepted[i] / some[i])
    figures["simulated_acceptance_length"] = float(1 + np.sum(prefix / np.maximum(slots, 1.0)))
    if float(regression):
        figures["regression"] = float(regression) / float(divisor[0])
    return figures


class AcceptanceMeter:
    """Answers held-out prompts with a head, by this library's own decoding.

    Args:
        prompts: token ids of each.
        longest: tokens of the longest prompt.
    """

    def __init__(
        self,
        config: EvaluationSection,
        loaded: LoadedTarget,
        head: TrainedHead,
        mesh: Mesh,
        prompts: Sequence[Sequence[int]],
    ):
        tree = build_tree(config.tree, head.config.method)
        self._head, self._target = head, loaded
        self._drafter = EagleDrafter(head.functional, head.config, tree, True, loaded.target.dtype)
        self._placed: Any = shardings(
            {path: spec.axes for path, spec in head.functional.specs.items()}, mesh, HEAD_RULES
        )
        longest = max(map(len, prompts))
        self._mesh, self._batch_size = mesh, config.batch_size
        self._max_model_len = min(longest + config.max_new_tokens, loaded.target.config.context_length)
        self._prompts = [{"prompt_token_ids": list(p)} for p in prompts]
        self._params = [
            SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=i)
            for i in range(len(prompts))
        ]
        self._llm: LLM | None = None

    def measure(self, trained: dict[str, jax.Array]) -> float:
        """Mean acceptance length over all verification steps of all answers."""
        embeddings = self._target.params["embed_tokens.weight"]
        output_weight = self._target.params.get("lm_head.weight", embeddings)
        everything = {**trained, **self._head.frozen}
        head = {
            path: jax.device_put(everything[path], self._placed[path]).astype(spec.dtype)
            for path, spec in self._head.functional.specs.items()
        }
        params = EagleParams(head, embeddings, output_weight)
        if self._llm is None:
            self._llm = LLM.of(
                self._target,
                self._mesh,
                self._drafter,
                params,
                max_model_len=self._max_model_len,
                batch_size=self._batch_size,
            )
        else:
            self._llm.replace_head(params)
        lengths = [
            length
            for result in self._llm.generate(self._prompts, self._params)
            for length in result.outputs[0].accept_lengths
        ]
        return sum(lengths) / len(lengths) if lengths else 1.0

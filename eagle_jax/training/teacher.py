"""What the target says of packed rows: the states that a head reads, and those that its logits are made from."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Params
from eagle_jax.training.unroll import OverSteps


def teach(
    target: Target,
    params: Params,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    taps: tuple[int, ...],
) -> tuple[Float[Array, "B T M"], Float[Array, "B T D"]]:
    """The states at `taps`, concatenated, and those after the final norm. No gradient passes.

    Args:
        taps: in boundary numbering, see `Decoder.run`.
    """

    def over_documents(layer: int, window: int | None) -> OverSteps:
        return OverSteps(segments, window=window)

    out = target.bind(params).run(tokens, positions, over_documents, taps)
    return jax.lax.stop_gradient((out.taps, out.hidden))

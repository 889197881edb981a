"""Attention over a committed prefix and over the rows of the present pass, merged by log-sum-exp.

Every row of a pass sees the same committed prefix of its sequence, so no [T, S] mask exists: the prefix part
is bounded by a length (and, under a sliding window, from below); the part among the new rows has its small
mask. Only the prefix part reads the cache, so only it is worth a kernel: a backend is a function with
`prefix_xla`'s signature.
"""

from eagle_jax.models.attention.merge import OverCache, attend
from eagle_jax.models.attention.xla import prefix_xla

__all__ = ["OverCache", "attend", "prefix_xla"]

"""Compiling dominates these tests, and what they check does not depend on how well XLA optimizes."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

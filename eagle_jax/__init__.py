"""eagle_jax: EAGLE speculative decoding in JAX. The same text, sooner.

`LLM`, `SamplingParams` and the outputs are the Python interface; `python -m eagle_jax.infer --help` is the
command. Names are imported on first use, so that a command can explain itself without loading JAX.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_jax.llm import LLM
    from eagle_jax.outputs import CompletionOutput, RequestOutput, StreamChunk
    from eagle_jax.sampling_params import SamplingParams

# transformers, of which tokenizers and configs are used, would say at import that it misses torch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_HOMES = {
    "LLM": "eagle_jax.llm",
    "CompletionOutput": "eagle_jax.outputs",
    "RequestOutput": "eagle_jax.outputs",
    "SamplingParams": "eagle_jax.sampling_params",
    "StreamChunk": "eagle_jax.outputs",
}

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamChunk"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checkpoint formats: Hugging Face folders, GGUF files and the library's own Orbax folders.

This part knows files, tensor names, shapes and dtypes. It does not know models or heads: which tensor fills
which parameter is said by a table of rules that stands beside the module to be filled (see
`load_parameters`).
"""

from eagle_jax.checkpoints.gguf_tokenizer import gguf_tokenizer
from eagle_jax.checkpoints.huggingface import save_safetensors
from eagle_jax.checkpoints.loading import Rule, load_parameters
from eagle_jax.checkpoints.resolve import load_tokenizer, open_source, resolve_checkpoint
from eagle_jax.checkpoints.source import CheckpointError, TensorInfo, TensorSource

__all__ = [
    "CheckpointError",
    "Rule",
    "TensorInfo",
    "TensorSource",
    "gguf_tokenizer",
    "load_parameters",
    "load_tokenizer",
    "open_source",
    "resolve_checkpoint",
    "save_safetensors",
]

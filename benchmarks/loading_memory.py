"""How much memory loading a checkpoint takes, against what the model itself takes.

Writes a Llama-like checkpoint of made-up weights in shards, loads it in a fresh process, and prints that
process's peak memory above what it had before loading. Goal: no more than the model and 1 GiB.

    python benchmarks/loading_memory.py --gib 4 --format safetensors
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle_jax.checkpoints import load_parameters, open_source, orbax, save_safetensors

GIB = 2**30
HIDDEN, FFN, KV, VOCABULARY = 4096, 14336, 1024, 32000
LAYER = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
FILL_ALL = [("(.*)", r"\1")]


def shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Tensors of a model that takes about `gib` in bfloat16."""
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    layer_bytes = 2 * sum(map(prod, LAYER.values()))
    layers = round((gib * GIB - 2 * sum(map(prod, found.values()))) / layer_bytes)
    for layer in range(max(1, layers)):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    return found


def tensors(gib: float) -> Iterator[tuple[str, np.ndarray]]:
    """Makes the tensors one by one."""
    noise = np.random.default_rng(0).normal(size=2**20).astype(ml_dtypes.bfloat16)
    for name, shape in shapes(gib).items():
        yield name, np.resize(noise, shape)


def write(folder: Path, gib: float, kind: str) -> None:
    """Writes the checkpoint in one of the formats."""
    if kind == "safetensors":
        save_safetensors(folder, tensors(gib), {"model_type": "llama"}, max_shard_bytes=GIB)
    elif kind == "orbax":
        orbax.save(folder, {name: jnp.asarray(tensor) for name, tensor in tensors(gib)}, {}, "target")
    else:
        import torch

        folder.mkdir()
        (folder / "config.json").write_text("{}")
        state = {
            name: torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
            for name, tensor in tensors(gib)
        }
        torch.save(state, folder / "pytorch_model.bin")


def peak_bytes() -> int:
    """The most memory this process has held at once."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count the parent's on Linux
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def load(folder: Path, dtype: str) -> None:
    """Loads the checkpoint and prints what it took as JSON."""
    source = open_source(folder)
    abstract = {
        name: jax.ShapeDtypeStruct(info.shape, jnp.dtype(dtype)) for name, info in source.infos.items()
    }
    jax.block_until_ready(jnp.zeros(8) + 1)
    before, start = peak_bytes(), time.perf_counter()
    if isinstance(source, orbax.OrbaxSource):
        params = orbax.restore(folder, abstract)
    else:
        params = load_parameters(source, FILL_ALL, abstract)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    model = sum(array.nbytes for array in params.values())
    print(json.dumps({"model": model, "peak": peak_bytes() - before, "seconds": seconds}))


def main() -> None:
    """Writes, loads in another process, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=4, help="size of the checkpoint, in bfloat16")
    parser.add_argument("--format", choices=["safetensors", "torch", "orbax"], default="safetensors")
    parser.add_argument("--dtype", default="bfloat16", help="dtype to load as; the checkpoint is bfloat16")
    parser.add_argument(
        "--folder", type=Path, help="where to put the checkpoint, rather than in a temporary folder"
    )
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.dtype)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary) / "model"
        write(folder, arguments.gib, arguments.format)
        child = [sys.executable, __file__, "--load", str(folder), "--dtype", arguments.dtype]
        found = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout)
    over = found["peak"] - found["model"]
    print(
        f"{arguments.format} as {arguments.dtype}: model {found['model'] / GIB:.2f} GiB, "
        f"peak memory {found['peak'] / GIB:.2f} GiB ({over / GIB:+.2f}), {found['seconds']:.1f} s: "
        + ("within model + 1 GiB" if over <= GIB else "MORE than model + 1 GiB")
    )
    sys.exit(over > GIB)


if __name__ == "__main__":
    main()

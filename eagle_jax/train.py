"""Train a draft head: `python -m eagle_jax.train --config FILE|NAME [key=value …]`.

Reads the config, runs it, says how it ended. A run that is stopped (Ctrl-C, SIGTERM, or worse) goes on where its last
checkpoint stands when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from eagle_jax.config import describe_keys, installed_configs
from eagle_jax.console.command import Parser, exit_code
from eagle_jax.training.config import TrainConfig, load_train_config

INTERRUPTED = 128  # plus the signal's number: the exit code of a run that was stopped


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eagle_jax.train",
        description=__doc__,
        epilog=f"installed configs: {', '.join(installed_configs('train')) or 'none'}\n\nkeys:\n"
        + describe_keys(TrainConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config", required=True, metavar="FILE|NAME", help="a YAML file, or the name of an installed config"
    )
    add("overrides", nargs="*", metavar="key=value", help="keys to set, dotted, with YAML values")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: see `exit_code`; 128 + n after a signal n, when all is saved."""
    code = 0

    def command() -> None:
        nonlocal code
        args = _parser().parse_intermixed_args(argv)
        config = load_train_config(args.config, args.overrides)
        from eagle_jax.training.trainer import Trainer

        console = Console()
        outcome = Trainer(config, console).run()
        if outcome.signal is not None:
            name = signal.Signals(outcome.signal).name
            console.print(f"{name}: saved after update {outcome.step}; the same command goes on from there")
            code = INTERRUPTED + outcome.signal
            return
        quality = ""
        if outcome.quality is not None:
            measured = config.evaluation.prompts > 0
            quality = f"; best {'τ' if measured else 'loss'} {abs(outcome.quality):.3f}"
        early = ", as it got no better" if outcome.stopped_early else ""
        best = os.path.join(config.output, "best" if outcome.quality is not None else "last")
        console.print(f"done after update {outcome.step}{early}{quality}; the head is in {best}")

    return exit_code(command) or code


if __name__ == "__main__":
    sys.exit(main())

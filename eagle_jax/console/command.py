"""What the commands have in common: mistakes are one line on stderr and exit code 2, Ctrl-C is 130."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from eagle_jax.errors import ConfigError, EagleError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of a config."""

    def error(self, message: str) -> NoReturn:
        """Raises what `exit_code` shows."""
        raise ConfigError(f"{message} (--help explains)")


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code: 0, 2 for what the user can mend, 130 for Ctrl-C."""
    try:
        command()
    except KeyboardInterrupt:
        return 130
    except EagleError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0

"""The ``main`` of accelerate's modules of commands: each runs the command of this project, as ``python -m`` does."""

from __future__ import annotations

import sys
from collections.abc import Callable


def command(*words: str) -> Callable[[], None]:
    """Return a function that runs `bigmodel WORDS...` with the arguments of this program, and exits.

    Args:
        words: The command; none: the first argument names it.
    """

    def main() -> None:
        from ..cli.main import main as run

        run([*words, *sys.argv[1:]])

    main.__doc__ = f"Run `{' '.join(('bigmodel', *words))}` with the arguments of this program, and exit."
    return main

"""Tables on standard output."""

from __future__ import annotations


def print_tables(*shown: object) -> None:
    """Print rich renderables, as wide as the terminal; without limit in a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for each in shown:
        console.print(each)

"""Fails as a command's own work may, in a function."""

from pathlib import Path


def reads_what_is_missing() -> None:
    Path("/nowhere/to/be/found").read_text()


reads_what_is_missing()

"""`bigmodel add-key`: make an API key for `bigmodel serve --api-key-file`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

File: TypeAlias = Annotated[Path, typer.Argument(help="File of keys; made, for its owner alone, if there is none.")]
Name: TypeAlias = Annotated[str, typer.Argument(help="Whose key it is: shown in metrics and errors.")]
_REQUESTS = typer.Option("--requests", min=1, help="Requests of a minute (default: any number).")
Requests: TypeAlias = Annotated[int | None, _REQUESTS]
_TOKENS = typer.Option("--tokens", min=1, help="Tokens of a minute, of prompts and answers (default: any number).")
Tokens: TypeAlias = Annotated[int | None, _TOKENS]


def add_key(file: File, name: Name, requests: Requests = None, tokens: Tokens = None) -> None:
    """Make an API key for NAME, print it once, and add its hash to FILE."""
    from bigmodel.atomic_files import written_atomically
    from bigmodel.errors import ServeError
    from bigmodel.server.http.keys import new_key, parse_keys

    key, kept = new_key(name, requests, tokens)
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except UnicodeDecodeError as error:
        raise ServeError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    text += ("" if text.endswith("\n") or not text else "\n") + kept.line() + "\n"
    parse_keys(text, str(file))  # raises where the name is there already, or the file is not one of keys
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    with written_atomically(file) as opened:
        os.fchmod(opened.fileno(), mode)
        opened.write(text.encode())
    print(key)

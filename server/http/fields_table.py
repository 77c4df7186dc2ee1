"""The table of fields for the guide."""

from __future__ import annotations

import json
from itertools import groupby

from bigmodel.server.http.fields import NOTES, Row, rows


def table(path: str) -> str:
    """Return the fields of a route as a table: those that are honoured, and those that are refused, by server."""
    found = list(rows(path))
    honoured = [
        f"| `{row.name}` | {', '.join(row.servers) or 'this server'} | {_note(row)} |" for row in found if row.honoured
    ]
    lines = ["| Honoured | Known from | |", "|---|---|---|", *honoured]
    refused = sorted((row for row in found if not row.honoured), key=lambda row: row.servers)
    if refused:
        lines += ["", "| Known from | Refused by name, but for values that ask for nothing |", "|---|---|"]
        for servers, group in groupby(refused, key=lambda row: row.servers):
            lines.append(f"| {', '.join(servers)} | {', '.join(map(_refused, group))} |")
    return "\n".join(lines)


def _note(row: Row) -> str:
    return NOTES.get(row.name, "")


def _refused(row: Row) -> str:
    values = " or ".join(f"`{json.dumps(value)}`" for value in row.neutral if not isinstance(value, float))
    return f"`{row.name}` (but {values})" if values else f"`{row.name}`"

"""Pages of other origins that may call the server from a browser (CORS): none by default.

A browser lets a page read what a server answers, and send JSON to it, only where the server names the page's origin. A
server on localhost without keys would otherwise be open to every page that its user visits.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from bigmodel.errors import ServeError

ANY = "*"

SHOWN = ("x-request-id", "retry-after")
"""Headers of answers that pages may read, beside those that they always may."""

_LIMITS = tuple(
    f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "tokens")
)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[^\s/?#@\[\]:*]+|\[[0-9a-f:.]+\])(?::\d{1,5})?", re.IGNORECASE)


def check_origins(origins: tuple[str, ...]) -> None:
    """Raise ServeError for what is no origin, such as an address with a path: no browser would send it."""
    for origin in origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
            raise ServeError(f"'{origin}' is no origin; give one as https://chat.example.com, or * for all")


def cors(app: ASGIApp, origins: tuple[str, ...]) -> Any:
    """``app`` with the headers that let pages of these ``origins`` call it, and its answers to their preflights.

    Keys are sent in headers, so that cookies are not needed and stay forbidden.
    """
    return CORSMiddleware(
        app,
        allow_origins=[origin if origin == ANY else origin.lower() for origin in origins],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=[ANY],
        expose_headers=[*SHOWN, *_LIMITS],
    )

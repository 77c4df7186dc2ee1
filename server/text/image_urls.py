"""Images that clients name by URL: fetched from hosts that the operator lists, and from no other.

A server that fetches what clients name can be made to ask hosts that only it reaches. So nothing is fetched without a
list, a redirect leads to listed hosts alone, and bytes and seconds are bounded. Whatever the name of a listed host
resolves to is trusted.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from bigmodel.errors import ServeError
from bigmodel.server.text.images import ImageError

MAX_BYTES = 16 << 20
"""Most bytes of all images of a conversation that are fetched."""

SECONDS = 10.0
"""Time limit for all images of a conversation that are fetched."""

REDIRECTS = 3
"""Redirects of an image that are followed."""

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:\*\.)?[a-z0-9-]+(?:\.[a-z0-9-]+)*(?::[0-9]{1,5})?")
_URL = re.compile(r"https?://[!-~]+")  # no spaces, no control characters, and no other alphabets
_HEADERS = {"Accept": "image/jpeg, image/png, image/webp", "Accept-Encoding": "identity", "User-Agent": "bigmodel"}


class ImageHosts:
    """Fetches images from listed hosts.

    Args:
        names: Of hosts, as ``images.example.com``; ``*.example.com`` for all below a domain; ``example.com:8080`` for
            another port than that of http or https.

    Raises:
        ServeError: A name is none of these.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in names)
        for name in sorted(self._names):
            if not _HOST.fullmatch(name):
                raise ServeError(
                    f"image host '{name}' is no name of a host, such as images.example.com or *.example.com"
                )

    def fetch(self, urls: Sequence[str]) -> list[str | bytes]:
        """Return the images of a conversation: those with http and https URLs are fetched, the others stay as they are.

        Raises:
            ImageError: A host is not listed, or does not send the image within the bounds.
        """
        end, left, found = time.monotonic() + SECONDS, MAX_BYTES, list[str | bytes]()
        for number, url in enumerate(urls):
            if not url.startswith(("http://", "https://")):
                found.append(url)
                continue
            try:
                found.append(self._fetched(url, left, end))
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from error
            left -= len(found[-1])
        return found

    def _fetched(self, url: str, limit: int, end: float) -> bytes:
        for _ in range(1 + REDIRECTS):
            parts = self._allowed(url)
            try:
                content, location = _get(parts, limit, end)
            except ImageError:
                raise
            except (OSError, http.client.HTTPException) as error:
                # The error may tell what lies behind a host: clients learn no more than that there is no image.
                why = "took too long" if time.monotonic() >= end else "cannot be fetched"
                raise ImageError(f"from {parts.hostname} {why}") from error
            if location is None:
                return content
            url = urljoin(url, location)
        raise ImageError(f"from {parts.hostname} has more than {REDIRECTS} redirects")

    def _allowed(self, url: str) -> SplitResult:
        """Return the parts of a URL of a listed host.

        Raises:
            ImageError: It is none.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # an address or a port that is none
            host = port = None
        if not host or not _URL.fullmatch(url) or "@" in parts.netloc or "\\" in parts.netloc:
            raise ImageError("is not a URL of an image, such as https://images.example.com/cat.png")
        suffix = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
        labels = host.split(".")
        above = ("*." + ".".join(labels[begin:]) + suffix for begin in range(1, len(labels)))
        if self._names.isdisjoint({host + suffix, *above}):
            raise ImageError(f"images are not fetched from {host[:100]}{suffix}; send the image itself")
        return parts


def _get(parts: SplitResult, limit: int, end: float) -> tuple[bytes, str | None]:
    """Return the body of an answer, or where it redirects to.

    Args:
        parts: Of the URL.
        limit: Most bytes of the body.
        end: When the connection is closed at the latest, in seconds of `time.monotonic`.
    """
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=max(end - time.monotonic(), 0.001))
    connected: list[socket.socket] = []
    # Timeouts of sockets are for each read: a host that sends a byte at a time would pass none of them.
    closing = threading.Timer(max(end - time.monotonic(), 0), lambda: _shut(*connected, connection.sock))
    closing.daemon = True
    closing.start()
    try:
        connection.connect()
        connected.append(connection.sock)  # the connection gives it away with an answer that ends with it
        connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=_HEADERS)
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            location = answer.headers.get("Location", "")
            return b"", location
        if answer.status != 200:
            raise ImageError(f"from {parts.hostname} was answered with status {answer.status}")
        content = answer.read(limit + 1)
        if len(content) > limit:
            raise ImageError(f"is too large: {MAX_BYTES >> 20} MiB of all images of a conversation are fetched at most")
        if answer.length or time.monotonic() >= end:  # the connection ended before the body did
            raise http.client.IncompleteRead(content)
        return content, None
    finally:
        closing.cancel()
        connection.close()


def _shut(*sockets: socket.socket | None) -> None:
    """End the reads of sockets that another thread waits in."""
    for each in sockets:
        if each is not None:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

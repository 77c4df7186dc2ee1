"""A part of a file on an HTTP server."""

from __future__ import annotations

from typing import Any

from huggingface_hub import utils

from ..errors import CheckpointFormatError

TIMEOUT_SECONDS = 10.0
"""How long a server may stay silent."""

_CHUNK = 64 * 1024
_BUSY = (408, 429, 500, 502, 503, 504)
_hub: Any = utils  # its names are exported lazily, which a type checker does not see


def read_range(url: str, token: str | bool | None, start: int, count: int) -> tuple[bytes, int]:
    """Up to `count` bytes of the file at `url` from `start`, and the size of the whole file in bytes.

    No more than that is received, whether or not the server knows ranges. A busy server is asked again.

    Args:
        url: the file's address on the Hub.
        token: as for huggingface_hub.
        start: first byte.
        count: how many bytes at most.

    Raises:
        CheckpointFormatError: the server does not say how long the file is.
        HfHubHTTPError: the server refuses.
    """
    headers = _hub.build_hf_headers(token=token)
    headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    options = {"timeout": TIMEOUT_SECONDS, "max_retries": 3, "retry_on_status_codes": _BUSY, "follow_redirects": True}
    with _hub.http_stream_backoff("GET", url, headers=headers, **options) as response:
        _hub.hf_raise_for_status(response)
        partial = response.status_code == 206
        # A server that ignores ranges sends the file from its beginning: stop listening after what is wanted.
        skip = 0 if partial else start
        content = bytearray()
        for chunk in response.iter_bytes(_CHUNK):
            content += chunk
            if len(content) >= skip + count:
                break
        size = response.headers.get("Content-Range" if partial else "Content-Length", "").rpartition("/")[2]
    if not size.isdigit():
        raise CheckpointFormatError(f"{url}: the server does not say how long the file is")
    return bytes(content[skip : skip + count]), int(size)

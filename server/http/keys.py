"""API keys with a name and limits each: how a file holds them, and what each may still take in a minute.

A file has one key per line, as it is or as its hash, with a name and limits after it:

    sha256:9f86d081884c7d65... name=alice requests=60 tokens=100000
    # comments and empty lines are left out

`requests` and `tokens` are those of a minute. Both flow back continuously, as into a bucket of a minute's size: a key
that was not used for a minute may take a whole minute's at once. Tokens are counted when they are known, those of the
prompt when it begins to be computed, and those of the answer at its end; a request is let in while there are any left,
and what it takes beyond them is missing in the time that follows.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from bigmodel.errors import ServeError

MINUTE = 60.0
_HASH = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True)
class ApiKey:
    """A key that is accepted.

    Attributes:
        digest: SHA-256 of the key's bytes, in hexadecimal.
        name: Whose it is, for metrics and logs.
        requests: Requests of a minute; None for no limit.
        tokens: Tokens of a minute, of prompts and answers together; None for no limit.
    """

    digest: str
    name: str
    requests: int | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, key: str, name: str | None = None, requests: int | None = None, tokens: int | None = None) -> ApiKey:
        """The key `key`, named after the beginning of its hash where it has no name.

        Raises:
            ServeError: no client could send it.
        """
        if not key or key != key.strip():
            raise ServeError("an API key is empty, or begins or ends with a space; no client could send it")
        digest = hashlib.sha256(key.encode()).hexdigest()
        return cls(digest, name or f"key-{digest[:8]}", requests, tokens)

    def line(self) -> str:
        """The line of a file that holds the key's hash."""
        limits = {"requests": self.requests, "tokens": self.tokens}
        return " ".join(
            [f"{_HASH}{self.digest}", f"name={self.name}", *(f"{k}={v}" for k, v in limits.items() if v is not None)]
        )


def new_key(name: str, requests: int | None = None, tokens: int | None = None) -> tuple[str, ApiKey]:
    """Return a new random key and what is kept of it. Raises ServeError for a name that a line cannot hold."""
    _check_name(name, "the name")
    key = f"bm-{secrets.token_urlsafe(32)}"
    return key, ApiKey.of(key, name, requests, tokens)


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Return the keys of a file's content.

    Args:
        text: The content.
        source: The file, for messages; no message quotes a key.

    Raises:
        ServeError: a line is wrong, a name or key stands twice, or there is no key, which must not open the server.
    """
    keys: dict[str, ApiKey] = {}
    digests: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key = _parse_line(line, f"{source}, line {number}")
        if key.name in keys or key.digest in digests:
            raise ServeError(f"{source}, line {number}: this key, or its name {key.name}, stands above already")
        keys[key.name] = key
        digests.add(key.digest)
    if not keys:
        raise ServeError(f"{source}: contains no key; write one per line, or omit --api-key-file for an open server")
    return tuple(keys.values())


def _parse_line(line: str, where: str) -> ApiKey:
    first, *rest = line.split()
    given = dict.fromkeys(("name", "requests", "tokens"), "")
    for part in rest:
        name, equals, value = part.partition("=")
        if name not in given or not equals or given[name]:
            raise ServeError(f"{where}: after the key stand name=, requests= and tokens=, each once and without spaces")
        given[name] = value
    if given["name"]:
        _check_name(given["name"], where)
    limits = [_limit(given[name], f"{where}: {name}") for name in ("requests", "tokens")]
    if not first.startswith(_HASH):
        return ApiKey.of(first, given["name"] or None, *limits)
    digest = first.removeprefix(_HASH)
    if not _DIGEST.fullmatch(digest):
        raise ServeError(f"{where}: after {_HASH} stand 64 hexadecimal digits in lower case")
    return ApiKey(digest, given["name"] or f"key-{digest[:8]}", *limits)


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ServeError(f"{where}: a name has 1 to 64 letters, digits, or . _ @ -")


def _limit(text: str, where: str) -> int | None:
    if not text:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) < 16 and int(text)):
        raise ServeError(f"{where}: a limit is a number from 1 on; leave it out for no limit")
    return int(text)


@dataclass
class _Bucket:
    """Token bucket: holds at most ``size``, refilled within a minute. May be negative."""

    size: int
    left: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.at = float(self.size), time.monotonic()

    def refill(self, now: float) -> None:
        self.left = min(float(self.size), self.left + (now - self.at) * self.size / MINUTE)
        self.at = now

    def seconds_until(self, amount: float) -> float:
        """Seconds until ``amount`` is there."""
        return max(0.0, (amount - self.left) * MINUTE / self.size)


class TooMuchError(ServeError):
    """A key has taken its requests or tokens of a minute.

    Attributes:
        seconds: When there are some again.
    """

    def __init__(self, name: str, what: str, limit: int, seconds: float) -> None:
        super().__init__(f"the key {name} has taken its {limit} {what} of a minute; try again in {seconds:.1f} seconds")
        self.seconds = seconds


class KeyRing:
    """The accepted keys, and what each may still take. Thread-safe."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._lock = threading.Lock()
        self._buckets = {
            key.name: {
                what: _Bucket(size) for what, size in (("requests", key.requests), ("tokens", key.tokens)) if size
            }
            for key in self._keys
        }

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key that was sent, if it is one of these."""
        digest = hashlib.sha256(given).hexdigest()
        # Every key is compared, in constant time: timing reveals neither which one matches nor how far.
        found = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return found[0] if found else None

    def named(self, name: str) -> ApiKey | None:
        """Return the key of this name, if there is one."""
        return next((key for key in self._keys if key.name == name), None)

    def take_request(self, name: str, *, kept: float = 0.0) -> None:
        """Count a request of the key ``name``. Raises TooMuchError where it has none left, or no tokens.

        ``kept``: share of both that it must leave to other requests; all may be taken where there is but one.
        """
        with self._lock:
            buckets = self._refilled(name)
            for what, bucket in buckets.items():
                needed = min(bucket.size, 1 + kept * bucket.size)
                if bucket.left < needed:
                    raise TooMuchError(name, what, bucket.size, bucket.seconds_until(needed))
            if "requests" in buckets:
                buckets["requests"].left -= 1

    def take_tokens(self, name: str, tokens: int) -> None:
        """Count tokens that a request of the key ``name`` has taken."""
        with self._lock:
            bucket = self._refilled(name).get("tokens")
            if bucket is not None:
                bucket.left -= tokens

    def headers(self, name: str) -> dict[str, str]:
        """OpenAI's headers about what the key ``name`` may take: its limits, what is left, and when all is there."""
        found = {}
        with self._lock:
            for what, bucket in self._refilled(name).items():
                found[f"x-ratelimit-limit-{what}"] = str(bucket.size)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.left)))
                found[f"x-ratelimit-reset-{what}"] = f"{bucket.seconds_until(bucket.size):.3f}s"
        return found

    def _refilled(self, name: str) -> dict[str, _Bucket]:
        buckets = self._buckets.get(name, {})
        now = time.monotonic()
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets

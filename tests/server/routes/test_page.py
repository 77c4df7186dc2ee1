"""GET /: the page's own script may run, and nothing else. How the page works is tested in a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx


def test_the_policy_lets_exactly_the_pages_own_script_run(url: str) -> None:
    answer = httpx.get(url)
    assert answer.headers["content-type"].startswith("text/html")
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_is_asked_with_head_too(url: str) -> None:
    answer = httpx.head(url)
    assert (answer.status_code, answer.content) == (200, b"")

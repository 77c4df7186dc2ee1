"""The reference page names every route and field, and loads nothing."""

from __future__ import annotations

import re

import httpx

from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.reference import page_of


def test_the_page_lists_routes_and_fields_and_loads_nothing(url: str) -> None:
    answer = httpx.get(f"{url}/docs")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in httpx.get(f"{url}/openapi.json").json()["paths"]:
        assert path in answer.text
    assert all(f"<code>{name}</code>" in answer.text for name in ChatBody.model_fields)
    assert re.findall(r"<script|<link|src=|href='(?!#|openapi.json)", answer.text) == []
    assert httpx.get(f"{url}/redoc").status_code == 404


def test_names_of_an_api_are_escaped() -> None:
    api = {
        "info": {"title": "<b>", "version": "1"},
        "paths": {"/<i>": {"get": {"description": "<u>"}}},
        "components": {"schemas": {"A": {"properties": {"<s>": {"type": "integer", "minimum": 0}}}}},
    }
    page = page_of(api)
    assert not {"<b>", "<i>", "<u>", "<s>"} & set(re.findall("<[a-z]>", page))
    assert "integer (≥ 0)" in page

"""instructor: objects out of answers, whole and growing, asked again where they are not accepted."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.server.clients.asked import NotedTrip
from tests.server.live import MODEL

instructor = pytest.importorskip("instructor", reason="instructor is not installed: make clients installs it")
pytest.importorskip("xgrammar", reason="xgrammar is not installed")

pytestmark = pytest.mark.slow
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]
HI: Any = [{"role": "user", "content": "hi"}]


def client(url: str, mode: str) -> Any:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=instructor.Mode[mode])


def given(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, "max_tokens": 300, "max_retries": 0, "seed": 2, **fields}


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_an_object(url: str, mode: str) -> None:
    assert isinstance(client(url, mode).create(response_model=NotedTrip, **given()), NotedTrip)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_grows(url: str, mode: str) -> None:
    *_, last = client(url, mode).create_partial(response_model=NotedTrip, **given())
    NotedTrip.model_validate(last.model_dump())


def test_a_response_is_an_object(url: str) -> None:
    made = client(url, "RESPONSES_TOOLS").create(response_model=NotedTrip, model=MODEL, messages=HI, max_retries=0)
    assert isinstance(made, NotedTrip)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_that_is_not_accepted_is_asked_for_again(url: str, mode: str) -> None:
    seen: list[int] = []

    class Second(NotedTrip):
        @pydantic.field_validator("days")
        @classmethod
        def _once(cls, days: int) -> int:
            seen.append(days)
            if len(seen) == 1:
                raise ValueError("another one, please")
            return days

    assert client(url, mode).create(response_model=Second, **given(max_retries=1)).days == seen[1]

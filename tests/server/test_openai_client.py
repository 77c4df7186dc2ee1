"""The official client works against the server unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.live import MODEL

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the end?"}]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "bigmodel"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the cat", max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


@pytest.mark.slow
def test_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "prompt": "the cat", "max_tokens": 30, "temperature": 1.2, "seed": 7}
    arguments["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len(chunks) > 5


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_an_answer_may_be_sent_back_in_every_form_the_client_has(client: openai.OpenAI) -> None:
    def ask(*more: object) -> openai.types.chat.ChatCompletionMessage:
        messages = [*MESSAGES, *more]
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4).choices[0].message  # type: ignore[arg-type]

    said = ask()
    for form in (said, said.model_dump(), said.to_dict(), {"role": "assistant", "content": said.content}):
        assert ask(form, {"role": "user", "content": "and?"}).role == "assistant"


@pytest.mark.slow
def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in body) == whole.choices[0].message.content
    assert body[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in body)


@pytest.mark.slow
def test_async_client_streams_many_at_once(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, seed=seed, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_at_once() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(12)))
            alone = [await one(client, seed) for seed in range(12)]
            return list(together), alone

    together, alone = asyncio.run(all_at_once())
    assert together == alone
    assert len(set(alone)) > 6


def test_chat_logprobs_add_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert entry.logprob <= 0
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content


def test_completion_echo_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="the cat", max_tokens=3, echo=True, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("the cat")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert len(logprobs.tokens or []) == (answer.usage.prompt_tokens if answer.usage else 0) + 3
    assert logprobs.tokens[0] == "the"  # type: ignore[index]
    assert logprobs.text_offset[1] == 3  # type: ignore[index]


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["the", "cat"], n=2, max_tokens=5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    one = client.completions.create(model=MODEL, prompt="cat", n=2, max_tokens=5, seed=1)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in one.choices]


def test_errors_raise_the_exception_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model=MODEL, prompt="x", temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt="x", extra_body={"frobnicate": 1})
    assert unknown.value.code == "unsupported_parameter"
    assert unknown.value.param == "frobnicate"

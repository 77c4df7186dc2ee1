"""What the server is doing decides what a route may use."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request as HTTPRequest

from bigmodel.errors import ServeError
from bigmodel.server import Loading, Settings
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.state import ServerState
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import tiny_engine, tiny_model, tiny_tokenizer

HTTP = HTTPRequest({"type": "http"})  # nobody waits with it


def state(stage: str = "starting", **changes: Any) -> ServerState:
    made = ServerState(Settings("tiny"), **changes)
    made.first.loading = Loading(stage)
    return made


async def refusal(server: ServerState, name: str | None = "tiny") -> APIError:
    with pytest.raises(APIError) as refused:
        async with server.model(HTTP, name):
            pass
    return refused.value


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"stage": "reading"}, "loading"),
        ({"draining": True}, "draining"),
        ({"failure": OSError("the disk is gone")}, "engine_stopped"),
    ],
)
async def test_the_error_says_why_there_is_no_engine(changes: dict[str, Any], code: str) -> None:
    refused = await refusal(state(**changes))
    assert (refused.status, refused.code) == (503, code)
    assert "disk" not in refused.message


@pytest.mark.anyio
async def test_the_model_is_lent_while_its_engine_runs() -> None:
    engine, serving = tiny_engine(), state()
    served = serving.first
    served.running = RunningModel("tiny", TextCodec(tiny_tokenizer()), engine)
    async with serving.model(HTTP, "tiny") as model:
        assert model is served.running
        assert served.in_use
    assert not served.in_use
    engine.stop()
    assert (await refusal(serving)).code == "engine_stopped"


@pytest.mark.anyio
async def test_only_the_served_model_exists() -> None:
    serving = state()
    serving.check_model("tiny")
    serving.check_model(None)
    with pytest.raises(APIError, match="this server has 'tiny'") as refused:
        serving.check_model("other")
    assert (refused.value.status, refused.value.param) == (404, "model")
    assert (await refusal(serving, "other")).code == "loading"  # it is not known yet what can be answered at all


@pytest.mark.parametrize(
    ("context", "limit"), [(1024, (128 << 10) + 32 * 1024), (4096, (128 << 10) + 32 * 4096), (1 << 18, 8 << 20)]
)
def test_the_longest_body_follows_from_the_context(context: int, limit: int) -> None:
    engine, serving = tiny_engine(tiny_model(max_position_embeddings=context), kv_bytes=256 << 20), state()
    assert serving.body_limit == 8 << 20  # it is not known yet what fits
    serving.first.running = RunningModel("tiny", TextCodec(tiny_tokenizer()), engine)
    assert serving.body_limit == serving.text_limit == limit
    engine.stop()


def test_a_limit_that_no_body_keeps_is_refused() -> None:
    with pytest.raises(ServeError, match="refuses every body"):
        Settings("tiny", max_body_bytes=0)


@pytest.mark.parametrize("key", ["", " ", "sesame ", "sesame\n"])
def test_invalid_api_keys_are_refused(key: str) -> None:
    with pytest.raises(ServeError, match="API key"):
        Settings("tiny", api_keys=("sesame", key))

"""What the server is doing decides what a route may use."""

from __future__ import annotations

from typing import Any

import pytest

from bigmodel.errors import ServeError
from bigmodel.server import Loading, Settings
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.state import ServerState
from bigmodel.server.text.codec import TextCodec
from tests.server.tiny import tiny_engine, tiny_tokenizer


def state(**changes: Any) -> ServerState:
    return ServerState(Settings("tiny"), **changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"loading": Loading("reading")}, "loading"),
        ({"draining": True}, "draining"),
        ({"failure": OSError("the disk is gone")}, "engine_stopped"),
    ],
)
def test_the_error_says_why_there_is_no_engine(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(APIError) as refused:
        state(**changes).ready_engine()
    assert (refused.value.status, refused.value.code) == (503, code)
    assert "disk" not in refused.value.message


def test_the_engine_is_returned_while_it_runs() -> None:
    engine, codec = tiny_engine(), TextCodec(tiny_tokenizer())
    serving = state(engine=engine, codec=codec)
    assert serving.ready_engine() == (engine, codec)
    engine.stop()
    with pytest.raises(APIError) as refused:
        serving.ready_engine()
    assert refused.value.code == "engine_stopped"


def test_only_the_served_model_exists() -> None:
    serving = state()
    serving.check_model("tiny")
    serving.check_model(None)
    with pytest.raises(APIError, match="this server has 'tiny'") as refused:
        serving.check_model("other")
    assert (refused.value.status, refused.value.param) == (404, "model")


@pytest.mark.parametrize("key", ["", " ", "sesame ", "sesame\n"])
def test_invalid_api_keys_are_refused(key: str) -> None:
    with pytest.raises(ServeError, match="API key"):
        Settings("tiny", api_keys=("sesame", key))

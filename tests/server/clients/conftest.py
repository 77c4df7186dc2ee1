"""Servers that clients of other projects speak to, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.clients.asked import AFTER_TOOLS
from tests.server.live import serving
from tests.server.scripted import scripted_app
from tests.server.test_tool_calls import HERMES
from tests.server.tiny import fresh_tokenizer


@pytest.fixture(scope="session")
def hermes() -> Iterator[str]:
    """The address of a model that reasons, calls both functions, and answers when it has their results."""
    app = scripted_app(HERMES, template="<think></think><tool_call>", after_tools=AFTER_TOOLS)
    with serving(app) as address:
        yield address


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model's tokenizer, for clients that have one of their own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    fresh_tokenizer().save_pretrained(folder)
    return folder

"""Folders of tiny models, and an application that serves several of them under one budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from bigmodel.server import EngineOptions, Settings, create_app
from bigmodel.server.loading import LoadOptions
from bigmodel.server.models.budgets import server_budgets
from bigmodel.server.models.named import planned_models
from bigmodel.server.models.served import ServedModel
from tests.server.tiny import tiny_model, tiny_tokenizer

SEQUENCES, CONTEXT = 2, 128


def save(folder: Path, seed: int, **changes: Any) -> str:
    """Save a tiny model with its tokenizer; return its path."""
    tiny_model(seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def several_app(
    models: Mapping[str, str],
    budgets: Mapping[Any, int | str],
    adapters: Mapping[str, Mapping[str, str]] | None = None,
    **settings: Any,
) -> FastAPI:
    """The application over models by name, which share `budgets`; `adapters` of each are folders by name."""
    options = LoadOptions(batch_size=SEQUENCES, context_length=CONTEXT)
    engine = EngineOptions(max_sequences=SEQUENCES, max_length=CONTEXT)
    return create_app(
        models=planned_models(models, options, adapters),
        budgets=server_budgets(budgets),
        settings=Settings("", engine=engine, **settings),
    )


def served(app: FastAPI, name: str) -> ServedModel:
    """A model of the application."""
    model: ServedModel = app.state.server.models[name]
    return model


def complete(url: str, model: str | None, prompt: Any = "the cat", **fields: Any) -> httpx.Response:
    """A greedy completion of `model`; it does not end before it is as long as it may be."""
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 4, **fields}
    if model is not None:
        body["model"] = model
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def text(answer: httpx.Response) -> str:
    """The text of a completion that went well."""
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found

"""Adapters over HTTP: a request names one as its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bigmodel.errors import ServeError
from bigmodel.server import EngineOptions, Settings, create_app
from bigmodel.server.loading import load
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.live import serving
from tests.server.oracle import generate
from tests.server.tiny import make_request, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    write_adapter(tiny_model(), folder / "legal", seed=1)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    def loader(progress: Any) -> Any:
        adapters = {"legal": str(folder / "legal")}
        return load(
            str(folder / "model"), progress=progress, adapters=adapters, max_memory={"cpu": "1GB"}, context_length=256
        )

    settings = Settings("tiny", engine=EngineOptions(max_sequences=4, max_length=256), adapters=("legal",))
    app = create_app(loader=loader, settings=settings)
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        while client.get("/ready").status_code != 200:
            pass
        yield client


def completion(client: httpx.Client, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "the law", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.slow
def test_a_request_names_an_adapter_as_its_model(client: httpx.Client, folder: Path) -> None:
    found = {name: completion(client, name) for name in ("tiny", "legal")}
    assert {name: each["model"] for name, each in found.items()} == {"tiny": "tiny", "legal": "legal"}
    greedy = make_request([1], temperature=0.0, max_tokens=8, ignore_eos=True).params
    prompt = tiny_tokenizer().encode("the law")
    for name, model in (("tiny", tiny_model()), ("legal", adapted(tiny_model(), folder / "legal"))):
        tokens = generate(model, tiny_tokenizer(), prompt, greedy)
        assert found[name]["choices"][0]["text"] == tiny_tokenizer().decode(tokens)


@pytest.mark.slow
def test_every_way_of_asking_names_the_adapter(client: httpx.Client) -> None:
    asked = [{"role": "user", "content": "the law"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": asked, "max_tokens": 4},
        "/v1/responses": {"input": "the law", "max_output_tokens": 16},
        "/v1/messages": {"messages": asked, "max_tokens": 4},
        "/v1/embeddings": {"input": "the law"},
    }
    for path, body in bodies.items():
        response = client.post(path, json={"model": "legal", **body})
        assert response.status_code == 200, (path, response.text)
        assert response.json()["model"] == "legal"
    vectors = [
        client.post("/v1/embeddings", json={"model": name, "input": "the law"}).json()["data"][0]["embedding"]
        for name in ("tiny", "legal")
    ]
    assert vectors[0] != vectors[1]


@pytest.mark.slow
def test_adapters_are_listed_with_their_model(client: httpx.Client) -> None:
    entries = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert set(entries) == {"tiny", "legal"}
    assert entries["legal"]["parent"] == "tiny"
    assert "parent" not in entries["tiny"]
    assert client.get("/v1/models/legal").json()["id"] == "legal"
    missing = client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert missing.status_code == 404
    assert "'legal'" in missing.json()["error"]["message"]


def test_an_adapter_cannot_have_the_models_name() -> None:
    with pytest.raises(ServeError, match="another name"):
        Settings("tiny", adapters=("tiny",))


@pytest.mark.slow
def test_budgets_are_planned_without_what_adapters_take(folder: Path) -> None:
    adapters = {"legal": str(folder / "legal")}
    plain, loaded = (
        load(str(folder / "model"), adapters=each, max_memory={"cpu": "10MB"}, context_length=256)
        for each in ({}, adapters)
    )
    [adapter] = loaded.adapters
    assert plain.plan.devices["cpu"].budget - loaded.plan.devices["cpu"].budget > adapter.nbytes

"""Adapters of several models behind one server: they come and go with their model, within the budget of all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.errors import ServeError
from bigmodel.server import EngineOptions, Settings, create_app
from bigmodel.server.adapters.files import adapters_bytes, read_adapter
from bigmodel.server.engine.budget import claimed_bytes
from bigmodel.server.loading import Loaded, Loading, LoadOptions, PlannedModel, load
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.server.adapters.trained import adapted, write_adapter
from tests.server.live import serving
from tests.server.models.several import CONTEXT, SEQUENCES, complete, save, served, several_app, text
from tests.server.oracle import generate
from tests.server.test_several_models import code_of, loaded, until, wait_ready
from tests.server.tiny import make_request, tiny_model, tiny_tokenizer

HOST = {"cpu": "1GiB"}
OF = {"legal": "a", "dry": "b", "terse": "b"}
"""Adapters, and the model of each."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models, by name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, seed, layers=2 + seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Folders of adapters by name, for each model."""
    root, found = tmp_path_factory.mktemp("adapters"), dict[str, dict[str, str]]()
    for seed, (name, model) in enumerate(OF.items()):
        base = tiny_model("ab".index(model), layers=2 + "ab".index(model))
        found.setdefault(model, {})[name] = str(write_adapter(base, root / name, seed, rank=16))
    return found


@pytest.fixture(scope="module")
def texts(adapters: dict[str, dict[str, str]]) -> dict[str, str]:
    """What peft's models, and the models themselves, answer."""
    greedy = make_request([1], temperature=0.0, max_tokens=4, ignore_eos=True).params
    found = {}
    for seed, model in enumerate("ab"):
        base = tiny_model(seed, layers=2 + seed)
        each = {model: base, **{name: adapted(base, Path(path)) for name, path in adapters[model].items()}}
        for name, one in each.items():
            tokens = generate(one, tiny_tokenizer(), tiny_tokenizer().encode("the cat"), greedy)
            found[name] = tiny_tokenizer().decode(tokens)
    assert len(set(found.values())) == 5
    return found


@pytest.fixture(scope="module")
def url(folders: dict[str, str], adapters: dict[str, dict[str, str]]) -> Iterator[str]:
    with serving(several_app(folders, HOST, adapters)) as address:
        wait_ready(address)
        yield address


@pytest.mark.slow
def test_each_adapter_answers_as_pefts_model_of_its_own_model(url: str, texts: dict[str, str]) -> None:
    for name in (*texts, *reversed(texts)):
        answer = complete(url, name)
        assert (text(answer), answer.json()["model"]) == (texts[name], name)


@pytest.mark.slow
def test_adapters_are_listed_with_their_models(url: str) -> None:
    entries = {entry["id"]: entry for entry in httpx.get(f"{url}/v1/models").json()["data"]}
    assert list(entries) == ["a", "b", *OF]
    assert {name: entry["parent"] for name, entry in entries.items() if "parent" in entry} == OF
    assert httpx.get(f"{url}/v1/models/terse").json()["parent"] == "b"
    missing = complete(url, "other")
    assert missing.status_code == 404
    assert "this server has 'a', 'b', 'legal', 'dry', 'terse'" in missing.text


@pytest.mark.slow
def test_every_way_of_asking_names_the_adapter(url: str) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer = httpx.post(f"{url}{path}", json={**body, "model": "terse"}, timeout=120)
        assert (answer.status_code, answer.json()["model"]) == (200, "terse"), answer.text
    assert httpx.post(f"{url}/tokenize", json={"prompt": "the", "model": "terse"}).json()["count"] == 1
    vectors = [
        httpx.post(f"{url}/v1/embeddings", json={"input": "x", "model": name}).json()["data"][0]["embedding"]
        for name in ("b", "dry", "terse")
    ]
    assert vectors[0] != vectors[1] != vectors[2] != vectors[0]


@pytest.mark.slow
@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_budget_holds_while_models_and_adapters_take_turns(
    folders: dict[str, str],
    adapters: dict[str, dict[str, str]],
    texts: dict[str, str],
    streams: bool,
    accelerators: None,
) -> None:
    """Any of them fits alone with its adapters, or is streamed; the accelerator has not a byte more."""
    options = LoadOptions(batch_size=SEQUENCES, context_length=CONTEXT)
    engine = EngineOptions(max_sequences=SEQUENCES)
    alone = PlannedModel(folders["b"], options).plan({0: 1 << 30, "cpu": 1 << 30})
    taken = adapters_bytes([read_adapter(name, path) for name, path in adapters["b"].items()])
    budget = claimed_bytes(alone, engine)[0] + taken - (100_000 if streams else 0)
    app = several_app(folders, {0: budget, **HOST}, adapters)
    reset_peak_memory(0)
    with serving(app) as url:
        wait_ready(url)
        for name in ("legal", "terse", "a", "b"):
            assert text(complete(url, name)) == texts[name]
            assert loaded(app) == [OF.get(name, name)]
            model = served(app, OF.get(name, name))
            assert taken // 4 < model.claimed[0] <= budget
            assert memory_allocated(0) <= max_memory_allocated(0) <= budget


@pytest.mark.long
@pytest.mark.slow
def test_a_model_that_is_unloaded_takes_its_adapters_along(
    folders: dict[str, str], adapters: dict[str, dict[str, str]], texts: dict[str, str], accelerators: None
) -> None:
    app = several_app(folders, {0: "1GiB", **HOST}, adapters, keep_alive=0.2)
    with serving(app) as url:
        for _ in range(2):
            assert text(complete(url, "terse")) == texts["terse"]
            running = served(app, "b").running
            assert running is not None
            module = running.model.get_submodule("model.layers.0.mlp.down_proj")  # who holds a module holds no adapter
            until(lambda: not served(app, "b").claimed and not served(app, "a").claimed)
            assert not module._forward_hooks
            until(lambda: memory_allocated(0) == 0)
            del module, running


@pytest.mark.slow
def test_claims_and_plans_count_adapters(folders: dict[str, str], adapters: dict[str, dict[str, str]]) -> None:
    options = LoadOptions(batch_size=SEQUENCES, context_length=CONTEXT)
    plain, model = (PlannedModel(folders["b"], options, each) for each in ({}, adapters["b"]))
    budgets: dict[int | str, int] = {"cpu": 1 << 28}
    budget, less = (each.plan(budgets).devices["cpu"].budget for each in (plain, model))
    assert budget is not None
    assert less is not None
    assert budget - less == model.adapters_bytes
    assert model.adapters_bytes > sum(read_adapter(*each).nbytes for each in adapters["b"].items())


@pytest.mark.slow
def test_requests_for_an_adapter_that_has_grown_changed_or_gone_are_refused_and_no_others(
    folders: dict[str, str],
    adapters: dict[str, dict[str, str]],
    tmp_path: Path,
    texts: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = {name: str(write_adapter(tiny_model(1, layers=3), tmp_path / name)) for name in ("grown", "other", "gone")}
    app = several_app(folders, HOST, {"b": {**made, "terse": adapters["b"]["terse"]}}, keep_alive=0.2)
    write_adapter(tiny_model(1, layers=3), tmp_path / "grown", rank=32)
    write_adapter(tiny_model(1, layers=4), tmp_path / "other")
    shutil.rmtree(tmp_path / "gone")
    with serving(app) as url:
        wait_ready(url)
        for name in (*made, "b", "terse", "a"):
            answer = complete(url, name)
            if name in made:
                assert (answer.status_code, code_of(answer)) == (503, "loading_failed")
                assert f"the adapter '{name}' was not loaded with 'b'" in answer.text
            else:
                assert text(answer) == texts[name]
        said = [record.getMessage() for record in caplog.records if record.name == "bigmodel.server.loading"]
        for name, why in (("grown", "start it anew"), ("other", "another model"), ("gone", "cannot be read")):
            assert any(f"adapter '{name}'" in line and why in line for line in said), said
        assert not any(record.exc_info for record in caplog.records)
        write_adapter(tiny_model(1, layers=3), tmp_path / "gone")
        until(lambda: not served(app, "b").claimed)
        answered = text(complete(url, "gone"))
        shutil.rmtree(tmp_path / "gone")  # what is loaded needs no file
        assert text(complete(url, "gone")) == answered


@pytest.mark.slow
def test_adapters_of_one_name_are_refused(folders: dict[str, str], adapters: dict[str, dict[str, str]]) -> None:
    path = adapters["a"]["legal"]
    options, budgets = LoadOptions(), {"cpu": 1 << 28}
    for first, second in (({"legal": path}, {"legal": path}), ({"b": path}, {})):
        models = {
            "a": PlannedModel(folders["a"], options, first),
            "b": PlannedModel(folders["a"], options, second),
        }
        with pytest.raises(ServeError, match="as another is; rename it"):
            create_app(models=models, budgets=budgets)
    with pytest.raises(ValueError, match="give them to PlannedModel"):
        create_app(models=models, budgets=budgets, settings=Settings("", adapters=("legal",)))


@pytest.mark.slow
def test_a_lone_model_is_loaded_again_without_an_adapter_that_has_gone(folders: dict[str, str], tmp_path: Path) -> None:
    write_adapter(tiny_model(0, layers=2), tmp_path / "legal")

    def loader(progress: Loading) -> Loaded:
        own = {"legal": str(tmp_path / "legal")}
        return load(
            folders["a"], progress=progress, adapters=own, max_memory=HOST, batch_size=2, context_length=CONTEXT
        )

    engine = EngineOptions(max_sequences=SEQUENCES)
    settings = Settings("a", engine=engine, adapters=("legal",), keep_alive=0.2)
    app = create_app(loader=loader, settings=settings)
    with serving(app) as url:
        wait_ready(url)
        assert complete(url, "legal").status_code == 200
        until(lambda: served(app, "a").running is None)
        shutil.rmtree(tmp_path / "legal")
        assert [complete(url, name).status_code for name in ("legal", "a")] == [503, 200]


def test_an_adapter_that_is_missing_is_refused_at_the_start(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"adapter 'legal': .*nowhere.adapter_config\.json cannot be read"):
        several_app(folders, HOST, {"a": {"legal": str(tmp_path / "nowhere")}})


@pytest.mark.slow
def test_an_adapter_of_another_kind_is_refused_at_the_start(
    folders: dict[str, str], adapters: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ServeError, match="only LORA is served"):
        several_app(folders, HOST, {"a": {"legal": str(tmp_path)}})

"""Several models behind one server and one budget: each answers as it would alone, and none passes the budget."""

from __future__ import annotations

import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import BertConfig, BertModel

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory, virtual
from bigmodel.profile import source
from bigmodel.server import EngineOptions, Loading
from bigmodel.server.engine import build
from bigmodel.server.engine.budget import claimed_bytes
from bigmodel.server.engine.compute.choose_runner import choose_runner
from bigmodel.server.engine.compute.plain import PlainRunner
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.loading import LoadOptions, PlannedModel
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.server.http.test_fields import GOOD, OF_MODELS
from tests.server.live import serving
from tests.server.models.several import CONTEXT, SEQUENCES, complete, save, served, several_app, text
from tests.server.tiny import ask as ask_engine
from tests.server.tiny import tiny_engine, tiny_model, tiny_tokenizer

NAMES = ("a", "b", "c")
HOST = {"cpu": "1GiB"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three models of different sizes, by name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, seed, layers=2 + seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def texts(folders: dict[str, str]) -> dict[str, str]:
    """What each of them answers alone, without a server."""
    found = {}
    for seed, name in enumerate(NAMES):
        engine = tiny_engine(tiny_model(seed, layers=2 + seed))
        answer = ask_engine(engine, "the cat", max_tokens=4, temperature=0.0, ignore_eos=True)
        answer.wait()
        engine.stop()
        found[name] = answer.text()
    assert len(set(found.values())) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def taken(folders: dict[str, str]) -> dict[str, int]:
    """Bytes of an accelerator that each of them takes alone: they are planned once."""
    options = LoadOptions(batch_size=SEQUENCES, context_length=CONTEXT)
    engine = EngineOptions(max_sequences=SEQUENCES)
    virtual.enable(count=2)
    found = {
        name: claimed_bytes(PlannedModel(path, options).plan({0: 1 << 30, "cpu": 1 << 30}), engine)[0]
        for name, path in folders.items()
    }
    virtual.disable()
    return found


@pytest.fixture
def needed(taken: dict[str, int], accelerators: None) -> dict[str, int]:
    """`taken`, for tests with accelerators."""
    return taken


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(0.01)


def wait_ready(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.05)


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


# --- names --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(folders: dict[str, str]) -> Iterator[str]:
    """A server of all three on the host, where they fit side by side."""
    with serving(several_app(folders, {"cpu": "1GiB"})) as address:
        wait_ready(address)
        yield address


@pytest.mark.slow
def test_each_model_answers_to_its_name(url: str, texts: dict[str, str]) -> None:
    for name in reversed(NAMES):
        answer = complete(url, name)
        assert (text(answer), answer.json()["model"]) == (texts[name], name)
    assert httpx.post(f"{url}/tokenize", json={"prompt": "the"}).status_code == 200  # the first, where none is named


@pytest.mark.slow
def test_all_models_are_listed_and_found(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == list(NAMES)
    assert (listed["first_id"], listed["last_id"]) == ("a", "c")
    for entry in listed["data"]:
        assert httpx.get(f"{url}/v1/models/{entry['id']}").json()["id"] == entry["id"]


@pytest.mark.parametrize("path", OF_MODELS)
def test_a_name_that_no_model_has_is_404(url: str, path: str) -> None:
    answer = httpx.post(f"{url}{path}", json={**GOOD[path], "model": "d"})
    assert answer.status_code == 404
    assert "the model 'd' does not exist; this server has 'a', 'b', 'c'" in answer.text
    assert httpx.get(f"{url}/v1/models/d").status_code == httpx.get(f"{url}/plan?model=d").status_code == 404


@pytest.mark.slow
def test_other_interfaces_choose_a_model_too(url: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer = httpx.post(f"{url}{path}", json={**body, "model": "b"}, timeout=120)
        assert (answer.status_code, answer.json()["model"]) == (200, "b"), answer.text
    assert httpx.post(f"{url}/tokenize", json={"prompt": "the", "model": "b"}).json()["count"] == 1


@pytest.mark.slow
def test_metrics_have_a_label_by_model(url: str) -> None:
    text(complete(url, "a"))
    text(complete(url, "b"))
    complete(url, "d")
    families = {family.name: family for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}
    generated = {sample.labels["model"] for sample in families["bigmodel_generated_tokens"].samples if sample.value}
    assert {"a", "b"} <= generated <= set(NAMES)
    outcomes = {(s.labels.get("model"), s.labels["outcome"]) for s in families["bigmodel_requests"].samples}
    assert {("a", "ok"), ("b", "ok"), (None, "refused_404")} <= outcomes
    kinds = {(s.labels.get("model"), s.labels["kind"]) for s in families["bigmodel_device_bytes"].samples}
    assert {("a", "weights"), (None, "allocated"), (None, "peak"), (None, "budget")} <= kinds
    assert not {("a", "allocated"), ("a", "budget")} & kinds
    loaded = {sample.labels["model"]: sample.value for sample in families["bigmodel_loaded"].samples}
    assert (loaded["a"], loaded["b"]) == (1, 1)


@pytest.mark.slow
def test_the_plan_is_that_of_a_model_beside_the_shares_of_all(url: str) -> None:
    text(complete(url, "b"))
    shown = httpx.get(f"{url}/plan").json()
    assert (shown["model"], shown["plan"]["batch_size"]) == ("a", SEQUENCES)
    other = httpx.get(f"{url}/plan?model=b&parts=false").json()
    assert (other["model"], other["plan"], other["engine"]["state"]) == ("b", None, "running")
    entries = {entry["name"]: entry for entry in other["models"]}
    assert list(entries) == list(NAMES)
    assert entries["b"]["state"] == "loaded"
    (claimed,) = entries["b"]["claimed"]
    assert claimed["device"] == "cpu"
    assert 0 < claimed["bytes"] < 1 << 30
    assert other["budgets"] == [{"device": "cpu", "bytes": 1 << 30}]


@pytest.mark.slow
def test_a_decoder_and_an_encoder_share_a_server_though_their_contexts_differ(
    folders: dict[str, str], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=64, vocab_size=300, max_position_embeddings=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    app = several_app({"a": folders["a"], "bert": str(tmp_path / "bert")}, HOST)
    with serving(app) as url:
        wait_ready(url)
        vectors = {"input": ["x" * 32, "the cat"], "model": "bert"}
        assert httpx.post(f"{url}/v1/embeddings", json=vectors, timeout=120).status_code == 200
        vectors["input"] = "x" * 33
        assert httpx.post(f"{url}/v1/embeddings", json=vectors).status_code == 400
        assert complete(url, "bert").status_code == 400
        assert text(complete(url, "a", "x" * 40))
        lengths = [entry["max_model_len"] for entry in httpx.get(f"{url}/v1/models").json()["data"]]
        assert lengths == [CONTEXT, 32]


# --- one budget ---------------------------------------------------------------------------------------


def loaded(app: Any) -> list[str]:
    return [name for name, model in app.state.server.models.items() if model.usable]


@pytest.mark.slow
def test_two_that_fit_side_by_side_stay_and_a_third_takes_their_place(
    folders: dict[str, str], needed: dict[str, int], texts: dict[str, str]
) -> None:
    app = several_app(folders, {0: needed["c"] + needed["a"] - 1, **HOST})
    with serving(app) as url:
        wait_ready(url)
        assert text(complete(url, "b")) == texts["b"]
        assert loaded(app) == ["a", "b"]
        assert text(complete(url, "c")) == texts["c"]
        assert loaded(app) == ["c"]
        assert text(complete(url, "a")) == texts["a"]
        assert loaded(app) == ["a"]


@pytest.mark.slow
def test_a_model_that_comes_back_is_neither_profiled_nor_checked_again(
    folders: dict[str, str], needed: dict[str, int], texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def counted(of: Any, name: str) -> None:
        own = getattr(of, name)

        def call(*args: Any, **options: Any) -> Any:
            done.append(name)
            return own(*args, **options)

        monkeypatch.setattr(of, name, call)

    monkeypatch.setattr(build, "choose_runner", choose_runner)  # every one, also that of an equal model
    counted(source, "profile_source")
    counted(PlainRunner, "forward")
    counted(PackedRunner, "_computed")
    app = several_app({name: folders[name] for name in "ab"}, {0: max(needed["a"], needed["b"]), **HOST})
    with serving(app) as url:
        wait_ready(url)
        for name in "ba":
            assert text(complete(url, name)) == texts[name]
        assert {*done} == {"profile_source", "forward", "_computed"}
        done.clear()
        for name in "ba":
            assert text(complete(url, name)) == texts[name]
        assert not done


@pytest.mark.long
@pytest.mark.slow
def test_a_model_that_is_streamed_anyway_gets_what_another_one_leaves(
    folders: dict[str, str], needed: dict[str, int], tmp_path: Path
) -> None:
    large = save(tmp_path / "large", 9, layers=12, intermediate_size=1024)
    app = several_app({"large": large, "a": folders["a"]}, {0: 4 * needed["a"], **HOST})
    with serving(app) as url:
        wait_ready(url)
        whole = served(app, "large").claimed[0]
        assert whole > 3 * needed["a"]
        expected = text(complete(url, "large", max_tokens=3))
        text(complete(url, "a"))
        assert loaded(app) == ["a"]  # it was there alone, and had all memory
        assert text(complete(url, "large", max_tokens=3)) == expected
        assert loaded(app) == ["large", "a"]
        assert 0 < served(app, "large").claimed[0] <= 3 * needed["a"]


@pytest.mark.slow
def test_an_unused_model_leaves_no_memory_no_thread_and_no_file(
    folders: dict[str, str], needed: dict[str, int], texts: dict[str, str], tmp_path: Path
) -> None:
    """Of one that is partly on the accelerator, partly in RAM and partly on disk."""
    shutil.copytree(folders["c"], tmp_path / "c")  # others may have the folder's files open
    budgets = {0: needed["c"] - 200_000, "cpu": 250_000}
    app = several_app({"c": str(tmp_path / "c"), "a": folders["a"]}, budgets, keep_alive=0.2)
    model = served(app, "c")
    before = set(threading.enumerate())
    with serving(app) as url:
        for _ in range(2):
            assert text(complete(url, "c")) == texts["c"]
            assert set(model.claimed) == {0, "cpu", "disk"}
            until(lambda: not model.claimed and not app.state.server.pool.busy)  # the last that unloading does
            assert (model.running, memory_allocated(0)) == (None, 0)
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()
            own = {thread.name for thread in set(threading.enumerate()) - before}
            assert not [name for name in own if name.startswith("bigmodel")]
        assert httpx.get(f"{url}/ready").status_code == 200


def swaps(app: Any, texts: Mapping[str, str], number: int, seed: int) -> None:
    """Ask models at random, one or several at once, until so many were unloaded for others; look at all times at what
    they have claimed and taken."""
    chance, over, done = random.Random(seed), [], threading.Event()
    unloaded: list[None] = []
    pool = app.state.server.pool
    pool.on_unloaded, budgets = lambda: unloaded.append(None), pool.budgets
    models = [served(app, name) for name in texts]

    def watch() -> None:
        while not done.wait(0.001):
            for key, budget in budgets.items():
                claimed = sum(model.claimed.get(key, 0) for model in models)
                if claimed > budget:
                    over.append((key, claimed))

    reset_peak_memory(0)
    watcher = threading.Thread(target=watch)
    with serving(app) as url, ThreadPoolExecutor(3) as clients:
        wait_ready(url)
        watcher.start()
        try:
            while len(unloaded) < number:
                asked = [chance.choice(NAMES) for _ in range(chance.choice((1, 1, 2, 3)))]
                answers = list(clients.map(lambda name: complete(url, name), asked))
                assert [text(answer) for answer in answers] == [texts[name] for name in asked]
                assert max_memory_allocated(0) <= budgets[0]
        finally:
            done.set()
            watcher.join(60)
    assert not over


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "streams"),
    [(2, True), *(pytest.param(200, streams, marks=pytest.mark.timeout(3000)) for streams in (False, True))],
)
def test_no_budget_is_passed_in_random_swaps(
    folders: dict[str, str], needed: dict[str, int], texts: dict[str, str], number: int, streams: bool
) -> None:
    """The accelerator has not a byte more than the budget: two of the models fit it, or all but one are streamed."""
    budget = needed["c"] - 350_000 if streams else needed["a"] + needed["b"]
    virtual.enable(1, budget)
    host = 400_000 if streams else 1 << 30
    swaps(several_app(folders, {0: budget, "cpu": host}), texts, number, seed=number)


# --- loading ------------------------------------------------------------------------------------------


class Gate:
    """Holds loads of one model back, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        self.open = threading.Event()
        self.begun = 0
        self.cancelled = 0
        load = PlannedModel.load

        def held(model: PlannedModel, plan: Any, progress: Loading) -> Any:
            if model.model == folder:
                self.begun += 1
                while not self.open.wait(0.01):
                    if progress.cancelled:
                        self.cancelled += 1
                    progress.report(1, 4)
            return load(model, plan, progress)

        monkeypatch.setattr(PlannedModel, "load", held)


@pytest.mark.slow
def test_other_models_answer_while_one_loads(
    folders: dict[str, str], texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, folders["b"])
    app = several_app(folders, HOST)
    with serving(app) as url, ThreadPoolExecutor(3) as clients:
        wait_ready(url)
        waiting = [clients.submit(complete, url, "b") for _ in range(3)]
        until(lambda: gate.begun == 1)
        assert text(complete(url, "a")) == texts["a"]
        assert httpx.get(f"{url}/ready").status_code == 200
        entry = httpx.get(f"{url}/plan").json()["models"][1]
        assert (entry["name"], entry["state"], entry["progress"]) == ("b", "loading", 0.25)
        assert not any(each.done() for each in waiting)
        gate.open.set()
        assert [text(each.result(60)) for each in waiting] == [texts["b"]] * 3
    assert gate.begun == 1


@pytest.mark.slow
def test_a_client_that_leaves_ends_the_load(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, folders["b"])
    app = several_app(folders, HOST)
    with serving(app) as url:
        wait_ready(url)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            body = b'{"model": "b", "prompt": "x"}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until(lambda: gate.begun == 1)
        until(lambda: gate.cancelled == 1)
        until(lambda: not served(app, "b").bringing)
        assert (served(app, "b").running, served(app, "b").claimed) == (None, {})
        gate.open.set()
        text(complete(url, "b"))


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_an_error_until_it_can(
    folders: dict[str, str], texts: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folders["b"], tmp_path / "b")
    weights = tmp_path / "b" / "model.safetensors"
    app = several_app({"a": folders["a"], "b": str(tmp_path / "b")}, HOST)
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with serving(app) as url:
        wait_ready(url)
        answer = complete(url, "b")
        assert (answer.status_code, code_of(answer)) == (503, "loading_failed")
        assert "the model 'b' could not be loaded (CheckpointFormatError)" in answer.text
        assert str(tmp_path) not in answer.text
        assert text(complete(url, "a")) == texts["a"]
        assert httpx.get(f"{url}/health").status_code == 200
        weights.write_bytes(content)
        assert text(complete(url, "b")) == texts["b"]


@pytest.mark.long
@pytest.mark.slow
def test_a_checkpoint_that_was_replaced_while_unloaded_is_planned_anew(
    folders: dict[str, str], texts: dict[str, str], tmp_path: Path
) -> None:
    """The folder of `b` has another model's files, with more layers, and then none."""
    folder = tmp_path / "b"
    shutil.copytree(folders["b"], folder)
    app = several_app({"b": str(folder), "a": folders["a"]}, HOST, keep_alive=0.1)
    with serving(app) as url:
        assert text(complete(url, "b")) == texts["b"]
        until(lambda: served(app, "b").running is None)
        shutil.rmtree(folder)
        shutil.copytree(folders["c"], folder)
        assert text(complete(url, "b")) == texts["c"]
        until(lambda: served(app, "b").running is None)
        shutil.rmtree(folder)
        assert (complete(url, "b").status_code, text(complete(url, "a"))) == (503, texts["a"])


@pytest.mark.long
@pytest.mark.slow
def test_a_request_waits_so_long_and_no_longer_for_one_in_use(
    folders: dict[str, str], needed: dict[str, int], texts: dict[str, str]
) -> None:
    app = several_app(folders, {0: needed["c"], **HOST})
    with serving(app) as url:
        for name in ("b", "a"):  # from now on they are planned
            text(complete(url, name))
        body = {"model": "a", "prompt": "the cat", "max_tokens": 20, "ignore_eos": True, "stream": True}
        served(app, "a").leases += 1  # as a request that is being prepared
        app.state.server.pool.patience = 0.2
        answer = complete(url, "b")
        assert (answer.status_code, code_of(answer), answer.headers["retry-after"]) == (503, "loading", "5")
        assert "waiting for a" in answer.text
        app.state.server.pool.patience = 60.0
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            served(app, "a").leases -= 1
            other = threading.Thread(target=lambda: text(complete(url, "b")))
            other.start()
            assert [line for line in lines if line][-1] == "data: [DONE]"  # it is not ended for the other
            other.join(60)
        assert served(app, "b").usable


@pytest.mark.slow
def test_a_server_that_shuts_down_lets_nobody_wait(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, folders["b"])
    app = several_app(folders, HOST)
    with serving(app) as url, ThreadPoolExecutor(1) as clients:
        wait_ready(url)
        waiting = clients.submit(complete, url, "b")
        until(lambda: gate.begun == 1)
        app.state.server.draining = True
        app.state.server.pool.refuse()
        answer = waiting.result(60)
        assert (answer.status_code, code_of(answer), answer.headers["retry-after"]) == (503, "draining", "5")
    assert gate.cancelled == 1


@pytest.mark.slow
def test_one_model_may_come_and_go_too(folders: dict[str, str], texts: dict[str, str]) -> None:
    from bigmodel.server import Settings, create_app
    from bigmodel.server.loading import load

    def loader(progress: Loading) -> Any:
        return load(folders["a"], progress=progress, max_memory=HOST, batch_size=SEQUENCES, context_length=CONTEXT)

    engine = EngineOptions(max_sequences=SEQUENCES)
    app = create_app(loader=loader, settings=Settings("a", engine=engine, keep_alive=0.2))
    with serving(app) as url:
        wait_ready(url)
        for _ in range(2):
            assert text(complete(url, "a")) == texts["a"]
            until(lambda: served(app, "a").running is None)
        assert "model=" not in httpx.get(f"{url}/metrics").text


@pytest.mark.slow
def test_a_lone_model_that_cannot_be_loaded_again_is_tried_again(folders: dict[str, str]) -> None:
    from bigmodel.server import Settings, create_app
    from bigmodel.server.loading import load

    broken = threading.Event()

    def loader(progress: Loading) -> Any:
        if broken.is_set():
            raise OSError("the disk is gone")
        return load(folders["a"], progress=progress, max_memory=HOST, batch_size=SEQUENCES, context_length=CONTEXT)

    app = create_app(loader=loader, settings=Settings("a", engine=EngineOptions(max_sequences=2), keep_alive=0.2))
    with serving(app) as url:
        wait_ready(url)
        until(lambda: served(app, "a").running is None)
        broken.set()
        answer = complete(url, "a")
        assert (answer.status_code, code_of(answer)) == (503, "loading_failed")
        assert httpx.get(f"{url}/health").status_code == 200
        broken.clear()
        assert complete(url, "a").status_code == 200

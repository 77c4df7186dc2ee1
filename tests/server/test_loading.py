"""From what a person types to a dispatched model with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bigmodel.dispatch.attach.dispatched import dispatched
from bigmodel.errors import CheckpointFormatError, CheckpointNotFoundError, ServeError, SizeError
from bigmodel.quantized.host_kernels import HOST_KERNELS
from bigmodel.server import Loaded, Loading
from bigmodel.server.loading import (
    LoadingCancelledError,
    display_name,
    load,
    load_images,
    load_with_draft,
    parse_max_memory,
    with_draft,
)
from tests.quantized.checkpoints import published
from tests.quantized.twins import packed
from tests.server.tiny import ask, tiny_engine, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_budgets() -> None:
    assert parse_max_memory(None) is None
    assert parse_max_memory("0=10GiB, cpu=8GiB,disk=1TB") == {0: "10GiB", "cpu": "8GiB", "disk": "1TB"}
    with pytest.raises(SizeError, match="DEVICE=SIZE"):
        parse_max_memory("10GiB")
    with pytest.raises(SizeError, match="names device 0 twice"):
        parse_max_memory("0=10GiB,0=8GiB")


def test_names(tmp_path: Path) -> None:
    assert display_name("org/model") == "org/model"
    (tmp_path / "mine").mkdir()
    assert display_name(str(tmp_path / "mine") + "/") == "mine"


def test_a_folder_is_loaded_and_its_progress_is_reported(folder: Path) -> None:
    progress = Loading()
    loaded = load(str(folder), device_map="cpu", progress=progress)
    assert (progress.stage, progress.fraction) == ("loading the weights", 1.0)
    assert loaded.tokenizer.encode("the cat") == tiny_tokenizer().encode("the cat")
    for (name, ours), theirs in zip(loaded.model.named_parameters(), tiny_model().parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_images_are_refused_in_one_line_that_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ImportError("\nVideos require the Torchvision library.\nSee how to install it.\n")

    transformers.LlavaConfig().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lacking)
    assert load_images(str(tmp_path), tiny_tokenizer(), {}) is None
    assert [record.getMessage() for record in caplog.records if record.name == "bigmodel.server.loading"] == [
        "images are refused: Videos require the Torchvision library."
    ]


def test_a_folder_that_is_no_models_says_what_it_lacks(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for folder in (tmp_path, tmp_path / "tokenizer"):
        with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json, so the architecture is not known"):
            load(str(folder))


def test_a_file_that_is_no_checkpoints_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointFormatError, match=r"notes\.txt: is neither \.safetensors, \.bin, \.gguf nor"):
        load(str(tmp_path / "notes.txt"))


@pytest.mark.slow
def test_a_model_partly_on_disk_is_served_with_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model(layers=8)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    plan = load(str(tmp_path), max_memory={"cpu": "1GB"}, context_length=128).plan
    most = plan.devices["cpu"].total * 9 // 10
    placed = load(str(tmp_path), max_memory={"cpu": most, "disk": "1GB"}, context_length=128)
    assert set(placed.model.hf_device_map.values()) == {"cpu", "disk"}
    whole, parts = tiny_engine(model), tiny_engine(placed.model)
    asked = [
        {"prompt": "the cat", "temperature": 0.0},
        {"prompt": "in the", "temperature": 1.0, "seed": 5, "logprobs": 2},
    ]
    expected = [ask(whole, **one, max_tokens=20, ignore_eos=True) for one in asked]
    got = [ask(parts, **one, max_tokens=20, ignore_eos=True) for one in asked]
    for resident, streamed in zip(expected, got, strict=True):
        resident.wait()
        streamed.wait()
        assert len(streamed.tokens()) == 20
        assert streamed.events == resident.events
    whole.stop()
    parts.stop()


@pytest.mark.slow
def test_quantised_weights_may_be_computed_as_they_are_packed(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    published(folder, packed(), vocab_size=512)
    tiny_tokenizer().save_pretrained(folder)
    for kernels in HOST_KERNELS:
        loaded = load(str(folder), device_map="cpu", host_kernels=kernels, context_length=64)
        assert loaded.plan.host_kernels == kernels
        assert bool(dispatched(loaded.model).packed) == (kernels == "packed")
        engine = tiny_engine(loaded.model)
        answer = ask(engine, prompt="the cat", temperature=0.0, max_tokens=8, ignore_eos=True)
        answer.wait()
        with torch.no_grad():
            first = loaded.model(torch.tensor([tiny_tokenizer().encode("the cat")])).logits[0, -1].argmax()
        assert len(answer.tokens()) == 8
        assert answer.tokens()[0] == first
        engine.stop()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        load(str(tmp_path / "nowhere"))


def test_loading_can_be_cancelled(folder: Path) -> None:
    progress = Loading(cancelled=True)
    with pytest.raises(LoadingCancelledError):
        load(str(folder), progress=progress)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ServeError, match=f"no tokenizer can be loaded from '{tmp_path}'"):
        load(str(tmp_path))


@pytest.mark.slow
def test_a_draft_model_is_loaded_beside_the_model(folder: Path) -> None:
    options = {"max_memory": {"cpu": "8MiB"}, "context_length": 64}
    assert load_with_draft(str(folder), None, **options).draft_model is None  # type: ignore[arg-type]
    both = load_with_draft(str(folder), str(folder), **options)  # type: ignore[arg-type]
    assert both.draft_model is not None
    assert both.draft_model is not both.model


def test_a_draft_model_must_have_the_same_tokens() -> None:
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    model, draft = Loaded(1, tiny_tokenizer()), Loaded(2, tiny_tokenizer())
    assert with_draft(model, draft).draft_model == 2
    with pytest.raises(ServeError, match="tokenizer"):
        with_draft(model, Loaded(2, Other()))


def test_progress_reports_stage_and_fraction() -> None:
    loading = Loading()
    loading.begin("reading")
    assert (loading.stage, loading.fraction) == ("reading", None)
    loading.report(1, 4)
    assert loading.fraction == 0.25
    loading.begin("preparing")
    assert (loading.stage, loading.fraction) == ("preparing", None)
    loading.report(0, 0)
    assert loading.fraction == 1.0


def test_cancelled_loading_ends_at_its_next_report() -> None:
    loading = Loading(cancelled=True)
    with pytest.raises(LoadingCancelledError):
        loading.report(1, 4)
    with pytest.raises(LoadingCancelledError):
        loading.begin("reading")


def test_bytes_in_use_before_loading_are_measured() -> None:
    loading = Loading()
    loading.measure()
    assert loading.before["cpu"] > 0


@pytest.mark.slow
def test_the_plan_knows_the_passes_of_a_draft_model(folder: Path) -> None:
    options = {"max_memory": {"cpu": "8MiB"}, "context_length": 64, "draft_tokens": 3}
    found = load_with_draft(str(folder), str(folder), **options).plan.speculation  # type: ignore[arg-type]
    assert found.most == 3
    assert found.proposing > 0.5 * found.pass_seconds(1)  # of the same model, placed otherwise
    assert found.count(1) == 0  # a draft model as slow as the model itself
    assert load_with_draft(str(folder), None, **options).plan.speculation.count(1) == 3  # type: ignore[arg-type]

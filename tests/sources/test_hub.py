from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from bigmodel.sources.headers import read_header
from bigmodel.sources.resolve import LocalSource, open_source
from tests.profile.hub_server import COMMIT, HubServer

from ..profile.sources import weight_bytes

MIB = 2**20
CONFIG = {"model_type": "llama", "hidden_size": 4}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    (tmp_path / "hub").mkdir()
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make_repo(hub: HubServer, name: str = "team/tiny", shards: int = 2, **extra: str) -> Path:
    """A repository of `shards` files with 4 MiB of weights each, and whatever small files are named."""
    folder = hub.root / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        tensors = {f"layers.{shard}.{part}.weight": torch.full((2**19,), float(shard)) for part in "ab"}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, content in extra.items():
        (folder / file.replace("__", ".")).write_text(content)
    return folder


def weight_bytes_sent(hub: HubServer) -> int:
    return sum(count for file, count in hub.sent.items() if file.endswith(".safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_headers_come_over_ranges_and_almost_no_weight_is_sent(hub: HubServer, cache: Path, shards: int) -> None:
    folder = make_repo(hub, shards=shards)

    source = open_source("team/tiny", cache_dir=cache)
    headers = source.headers()

    assert source.config_dict() == CONFIG
    assert weight_bytes(source) == shards * 4 * MIB
    assert weight_bytes_sent(hub) < 70 * 1024
    for file, header in headers.items():
        local = read_header(folder / file)
        assert dict(header) == dict(local)
        assert (header.file_size, header.data_start) == (local.file_size, local.data_start)
    assert set(source.weight_map().values()) == set(headers)


@pytest.mark.slow
def test_headers_are_read_once(hub: HubServer, cache: Path) -> None:
    make_repo(hub)
    source = open_source("team/tiny", cache_dir=cache)
    source.headers()
    before = list(hub.requests)
    source.headers()
    weight_bytes(source)
    assert hub.requests == before


def test_a_header_longer_than_expected_takes_a_second_range(hub: HubServer, cache: Path) -> None:
    folder = hub.root / "team/wide"
    folder.mkdir(parents=True)
    save_file({f"{'x' * 90}.{i}": torch.zeros(1000) for i in range(1000)}, folder / "model.safetensors")

    headers = open_source("team/wide", cache_dir=cache).headers()

    assert len(headers["model.safetensors"]) == 1000
    assert hub.requests == ["GET model.safetensors"] * 2
    assert weight_bytes_sent(hub) == headers["model.safetensors"].data_start


@pytest.mark.slow
def test_a_server_that_ignores_ranges_is_cut_off_after_the_header(hub: HubServer, cache: Path) -> None:
    hub.ignore_ranges = True
    folder = hub.root / "team/big"
    folder.mkdir(parents=True)
    save_file({"w": torch.zeros(16 * MIB)}, folder / "model.safetensors")

    header = open_source("team/big", cache_dir=cache).headers()["model.safetensors"]

    assert header.file_size == os.path.getsize(folder / "model.safetensors")
    assert weight_bytes_sent(hub) < 32 * MIB  # half the file: what the sockets hold


def test_a_server_error_is_tried_again(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the two
    make_repo(hub, shards=1)
    hub.refuse["model.safetensors"] = 1
    assert open_source("team/tiny", cache_dir=cache).headers()
    assert hub.requests.count("GET model.safetensors") == 2


@pytest.mark.slow
def test_fetching_downloads_the_weights_and_what_belongs_to_them_only(hub: HubServer, cache: Path) -> None:
    folder = make_repo(hub, tokenizer__json="{}", modeling__py="boom", README__md="")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    (folder / "extra.safetensors").write_bytes(b"x" * 100)

    fetched = open_source("team/tiny", cache_dir=cache).fetch_weights()

    assert {path.name for path in fetched.iterdir()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert weight_bytes(LocalSource(fetched)) == 8 * MIB


@pytest.mark.slow
def test_code_is_downloaded_only_when_it_is_trusted(hub: HubServer, cache: Path) -> None:
    make_repo(hub, shards=1, modeling__py="boom")
    fetched = open_source("team/tiny", cache_dir=cache, trust_remote_code=True).fetch_weights()
    assert (fetched / "modeling.py").read_text() == "boom"


@pytest.mark.slow
def test_a_download_that_left_files_out_is_never_taken_for_the_model(hub: HubServer, cache: Path) -> None:
    make_repo(hub)
    source = open_source("team/tiny", cache_dir=cache)
    source.config_dict()
    hub.no_listing = True
    try:
        fetched = source.fetch_weights()
    except CheckpointNotFoundError as error:
        # Which of the two it is depends on when huggingface_hub asks for the listing.
        assert re.search(r"model-00001-of-00002.*could not be downloaded|lacks a file", str(error))  # noqa: PT017
    else:  # older releases of huggingface_hub need no listing
        assert weight_bytes(LocalSource(fetched)) == 8 * MIB


@pytest.mark.slow
def test_a_repository_without_safetensors_says_so_and_can_still_be_fetched(hub: HubServer, cache: Path) -> None:
    folder = hub.root / "team/old"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)

    source = open_source("team/old", cache_dir=cache)

    with pytest.raises(CheckpointFormatError, match=r"team/old: has no safetensors, only pytorch_model\.bin"):
        source.headers()
    assert (source.fetch_weights() / "pytorch_model.bin").read_bytes() == b"x" * 100


def test_a_repository_without_any_weights_says_so(hub: HubServer, cache: Path) -> None:
    (hub.root / "team/empty").mkdir(parents=True)
    source = open_source("team/empty", cache_dir=cache)
    with pytest.raises(CheckpointNotFoundError, match="team/empty: holds no checkpoint"):
        source.headers()
    with pytest.raises(CheckpointNotFoundError, match=r"team/empty: has no config\.json"):
        source.config_dict()


def test_a_missing_repository_is_named(hub: HubServer, cache: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="team/none: is neither a local path nor a repository"):
        open_source("team/none", cache_dir=cache)


def test_a_missing_revision_is_named(hub: HubServer, cache: Path) -> None:
    make_repo(hub, shards=1)
    with pytest.raises(CheckpointNotFoundError, match="has no branch, tag or commit 'v9'"):
        open_source("team/tiny", revision="v9", cache_dir=cache)


def test_what_is_no_repository_name_is_refused_without_a_request(hub: HubServer, cache: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither an existing path nor the name"):
        open_source("two words", cache_dir=cache)


def test_a_gated_repository_asks_for_a_login(hub: HubServer, cache: Path) -> None:
    make_repo(hub, shards=1)
    hub.gated.add("team/tiny")
    with pytest.raises(CheckpointNotFoundError, match="access must be granted first"):
        open_source("team/tiny", token=False, cache_dir=cache).headers()
    assert open_source("team/tiny", token="hf_secret", cache_dir=cache).headers()


def test_an_index_that_names_a_shard_the_repository_lacks_is_refused(hub: HubServer, cache: Path) -> None:
    folder = make_repo(hub)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="lacks a file that its index names"):
        open_source("team/tiny", cache_dir=cache).headers()


@pytest.mark.slow
def test_a_damaged_shard_is_named(hub: HubServer, cache: Path) -> None:
    folder = make_repo(hub)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 1000)
    with pytest.raises(CheckpointFormatError, match=r"team/tiny/model-00002-of-00002\.safetensors"):
        open_source("team/tiny", cache_dir=cache).headers()


@pytest.mark.slow
def test_a_later_commit_does_not_mix_with_what_was_read(hub: HubServer, cache: Path) -> None:
    make_repo(hub)
    source = open_source("team/tiny", revision="main", cache_dir=cache)
    assert source.fetch_weights().name == COMMIT


@pytest.mark.slow
def test_without_a_server_the_cache_serves(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repo(hub)
    open_source("team/tiny", cache_dir=cache).fetch_weights()
    requests = list(hub.requests)

    cached = open_source("team/tiny", cache_dir=cache, local_files_only=True)
    assert weight_bytes(cached) == 8 * MIB
    assert cached.name == "team/tiny"
    assert hub.requests == requests

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert weight_bytes(open_source("team/tiny", cache_dir=cache)) == 8 * MIB


def test_without_a_server_and_a_cache_one_error_says_both(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointNotFoundError, match=r"nor in the cache, and http://127\.0\.0\.1:9 cannot be"):
        open_source("team/tiny", cache_dir=cache)
    with pytest.raises(CheckpointNotFoundError, match="only local files may be used"):
        open_source("team/tiny", cache_dir=cache, local_files_only=True)


def test_a_refusal_of_another_kind_is_a_checkpoint_error(hub: HubServer, cache: Path) -> None:
    folder = hub.root / "team/zero"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="team/zero"):
        open_source("team/zero", cache_dir=cache).headers()

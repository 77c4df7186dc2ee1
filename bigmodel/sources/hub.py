"""A model on the Hub: config and safetensors headers are read over HTTP, weights are downloaded only on request.

A header is read with a range request for the first bytes of its file, sized by what the index says about it, so
planning a checkpoint of hundreds of gigabytes transfers a few megabytes.
"""

from __future__ import annotations

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub import constants
from tqdm import tqdm

from ..errors import CheckpointFormatError, CheckpointNotFoundError
from .headers import LENGTH_BYTES, SafetensorsHeader, header_length, parse_header
from .hub_http import TIMEOUT_SECONDS, UnreachableError, hub_endpoint, hub_errors, read_range
from .index import choose_checkpoint_file, merge_weight_map, read_index
from .local import CONFIG_FILE, LocalSource, ModelSource, parse_config

logger = logging.getLogger(__name__)

_CONNECTIONS = 8
_SINGLE_FILE_GUESS = 64 * 1024
_BYTES_PER_ENTRY = 120
"""Upper estimate of the bytes of a header entry besides the tensor's name: dtype, shape and offsets."""


def open_remote(
    repo_id: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
    trust_remote_code: bool,
) -> ModelSource:
    """Return the repository `repo_id` on the Hub, or in the cache when offline or if the Hub cannot be reached.

    Arguments and exceptions are those of `bigmodel.sources.resolve.open_source`.
    """
    cache = None if cache_dir is None else os.fspath(cache_dir)
    if local_files_only or constants.HF_HUB_OFFLINE:
        return _cached(repo_id, revision, cache, reason="only local files may be used")
    source = HubSource(repo_id, revision, token, cache, trust_remote_code)
    try:
        source.connect()
    except UnreachableError as error:
        cached = _cached(repo_id, revision, cache, reason=str(error))
        logger.warning("%s; using what the cache holds of %s", error, repo_id)
        return cached
    return source


def _cached(repo_id: str, revision: str | None, cache_dir: str | None, reason: str) -> LocalSource:
    with hub_errors(repo_id, revision):
        found = hub.try_to_load_from_cache(repo_id, CONFIG_FILE, cache_dir=cache_dir, revision=revision)
    if not isinstance(found, str):
        raise CheckpointNotFoundError(
            f"{repo_id}: is neither a local folder nor in the cache, and {reason}; "
            "download it once while online, or give the path of a local folder"
        )
    source = LocalSource(Path(found).parent)
    source.name = repo_id
    return source


class HubSource(ModelSource):
    """A repository on a server with the Hub's HTTP interface, pinned to the commit that `connect` finds."""

    def __init__(
        self,
        repo_id: str,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | None,
        trust_remote_code: bool,
    ) -> None:
        self.name = repo_id
        self.revision = revision
        self.token = token
        self.cache_dir = cache_dir
        self.trust_remote_code = trust_remote_code
        self.commit = revision
        self.endpoint = hub_endpoint()
        self.files: list[str] = []

    def connect(self) -> None:
        """Request the list of files and pin the commit to which it belongs."""
        with hub_errors(self.name, self.revision):
            api = hub.HfApi(endpoint=self.endpoint, token=self.token)
            info = api.model_info(self.name, revision=self.revision, timeout=TIMEOUT_SECONDS)
        self.commit = info.sha or self.revision
        self.files = [sibling.rfilename for sibling in info.siblings or []]

    def config_dict(self) -> dict[str, Any]:
        if CONFIG_FILE not in self.files:
            raise CheckpointNotFoundError(f"{self.name}: has no {CONFIG_FILE}; it is not a transformers model")
        path = self._download(CONFIG_FILE)
        return parse_config(path.read_bytes(), f"{self.name}/{CONFIG_FILE}")

    def weight_files(self) -> list[str]:
        for file in self._shards:
            if not file.endswith(".safetensors"):
                raise CheckpointFormatError(
                    f"{self.name}: has no safetensors, only {file}, whose contents cannot be known without "
                    "downloading it; choose a revision with safetensors, or convert it with bigmodel.save_model"
                )
        return self._shards

    def headers(self) -> dict[str, SafetensorsHeader]:
        return self._headers

    def weight_map(self) -> dict[str, str]:
        return merge_weight_map(self._headers, self._index, f"{self.name}/{self._file}")

    def fetch_weights(self) -> Path:
        wanted = {file for file in self.files if _is_companion(file, self.trust_remote_code)}
        wanted |= {self._file, *self._shards}
        if CONFIG_FILE in self.files:
            self._download(CONFIG_FILE)
        with hub_errors(self.name, self.revision):
            folder = hub.snapshot_download(
                self.name,
                revision=self.commit,
                token=self.token,
                cache_dir=self.cache_dir,
                endpoint=self.endpoint,
                allow_patterns=sorted(wanted),
                tqdm_class=None if sys.stderr.isatty() else _SilentProgress,
            )
        # If the server cannot list the files, snapshot_download returns the cache as it is.
        missing = sorted(file for file in wanted if not Path(folder, file).is_file())
        if missing:
            raise CheckpointNotFoundError(
                f"{self.name}: {', '.join(missing)} could not be downloaded from {self.endpoint}; try again"
            )
        return Path(folder)

    @cached_property
    def _file(self) -> str:
        return choose_checkpoint_file((file for file in self.files if "/" not in file), self.name)

    @cached_property
    def _index(self) -> dict[str, str] | None:
        return read_index(self._download(self._file)) if self._file.endswith(".json") else None

    @property
    def _shards(self) -> list[str]:
        return [self._file] if self._index is None else sorted(set(self._index.values()))

    @cached_property
    def _headers(self) -> dict[str, SafetensorsHeader]:
        self.weight_files()
        guesses = self._expected_header_bytes()
        # Not a `with` block: that would complete every queued request after Ctrl-C.
        pool = ThreadPoolExecutor(max_workers=min(_CONNECTIONS, len(guesses)))
        try:
            return dict(zip(guesses, pool.map(self._read_header, guesses, guesses.values()), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)

    def _expected_header_bytes(self) -> dict[str, int]:
        """Return the size in bytes of the first range request by shard: its header, with little beyond."""
        if self._index is None:
            return {self._file: _SINGLE_FILE_GUESS}
        guesses = dict.fromkeys(self._shards, LENGTH_BYTES + 2 * _BYTES_PER_ENTRY)
        for name, file in self._index.items():
            guesses[file] += len(name.encode()) + _BYTES_PER_ENTRY
        return guesses

    def _read_header(self, file: str, guess: int) -> SafetensorsHeader:
        source = f"{self.name}/{file}"
        prefix, size = self._read_range(file, 0, guess)
        missing = LENGTH_BYTES + header_length(prefix, size, source) - len(prefix)
        if missing > 0:
            prefix += self._read_range(file, len(prefix), missing)[0]
        return parse_header(prefix, size, source)

    def _read_range(self, file: str, start: int, count: int) -> tuple[bytes, int]:
        """Return up to `count` bytes of `file` from `start`, and the size of the whole file in bytes."""
        url = hub.hf_hub_url(self.name, file, revision=self.commit, endpoint=self.endpoint)
        with hub_errors(self.name, self.revision):
            return read_range(url, self.token, start, count)

    def _download(self, file: str) -> Path:
        """Return a file of the pinned commit from the cache, after downloading it if need be."""
        # The requested revision first: the cache then records the commit of a branch for offline use.
        for revision in (self.revision, self.commit):
            with hub_errors(self.name, revision):
                path = hub.hf_hub_download(
                    self.name,
                    file,
                    revision=revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                )
            if Path(path).parent.name == self.commit:
                break
        return Path(path)


class _SilentProgress(tqdm):
    """Disables huggingface_hub's progress bars if standard error is not a terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})


def _is_companion(file: str, trust_remote_code: bool) -> bool:
    """Whether a file is needed besides the weights: configs, tokenizer files, and code if it is trusted."""
    if "/" in file:
        return file.endswith("_Pooling/config.json")  # of sentence-transformers: how states become an embedding
    if file.endswith(".py"):
        return trust_remote_code
    if file.endswith(".index.json"):
        return False
    return file.endswith((".json", ".model", ".txt", ".jinja", ".tiktoken", ".vocab"))

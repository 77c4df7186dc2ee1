"""Resolves a model's name, a path or an id on the Hub, to the source of its config and headers."""

from __future__ import annotations

import os
from pathlib import Path

from ..arguments import shown
from ..errors import CheckpointNotFoundError
from .gguf.model import find_gguf
from .gguf.source import GgufSource
from .local import LocalSource, ModelSource
from .special_files import refuse_special_files


def open_source(
    id_or_path: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Return the source of a model's config and headers, which fetches the weights on request. No weight is read.

    Args:
        id_or_path: a folder, a ``.safetensors``, ``.index.json`` or ``.gguf`` file, or a repository on the Hub
            (``"name"`` or ``"owner/name"``; the server is ``HF_ENDPOINT`` where that is set).
        revision: branch, tag or commit of the repository.
        token: access token; None uses the token of the current login, False none.
        cache_dir: folder of downloads; None uses huggingface_hub's cache.
        local_files_only: use only the cache; send no request.
        trust_remote_code: whether `ModelSource.fetch_weights` also downloads ``*.py``. No code is run here.

    Raises:
        CheckpointNotFoundError: no such path, repository or revision, or the Hub cannot be reached and the
            cache does not hold the model.
        CheckpointFormatError: what lies there under the name of a file is none.
    """
    if not isinstance(id_or_path, (str, os.PathLike)) or "\0" in os.fspath(id_or_path):
        raise CheckpointNotFoundError(f"{shown(id_or_path)} is neither a path nor the name of a repository")
    path = Path(id_or_path).expanduser()
    if path.exists():
        refuse_special_files(path)
        gguf = find_gguf(path)
        return LocalSource(path) if gguf is None else GgufSource(gguf)
    name = os.fspath(id_or_path)
    if _looks_like_path(name):
        raise CheckpointNotFoundError(f"{name!r}: there is no such folder or file")
    # Imported here: a local model needs no HTTP client.
    from .hub import open_remote

    return open_remote(
        name,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )


def _looks_like_path(name: str) -> bool:
    return not name or name[0] in "./~\\" or name.count("/") > 1 or "\\" in name or Path(name).is_absolute()

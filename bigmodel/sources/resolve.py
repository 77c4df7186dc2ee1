"""From a model's name, an id on the Hub or a path, to where its config and headers come from."""

from __future__ import annotations

import os
from pathlib import Path

from ..arguments import shown
from ..errors import CheckpointNotFoundError
from .local import LocalSource, ModelSource


def open_source(
    id_or_path: str | os.PathLike[str],
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Where the config, the headers and, when asked for, the weights of a model come from. No weight is read.

    Args:
        id_or_path: a folder, a ``.safetensors`` or ``.index.json`` file, or a repository on the Hub
            (``"name"`` or ``"owner/name"``; the server is ``HF_ENDPOINT`` where that is set).
        revision: branch, tag or commit of the repository.
        token: access token; None takes the one that is logged in, False none.
        cache_dir: where downloads go; None takes huggingface_hub's cache.
        local_files_only: use the cache alone and ask no server.
        trust_remote_code: whether `ModelSource.fetch_weights` also downloads ``*.py``. None is run here.

    Raises:
        CheckpointNotFoundError: no such path, repository or revision, or the Hub cannot be reached and the
            cache does not hold the model.
    """
    if not isinstance(id_or_path, (str, os.PathLike)) or "\0" in os.fspath(id_or_path):
        raise CheckpointNotFoundError(f"{shown(id_or_path)} is neither a path nor the name of a repository")
    path = Path(id_or_path).expanduser()
    if path.exists():
        return LocalSource(path)
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

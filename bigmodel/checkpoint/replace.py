"""Replaces the checkpoint in a folder atomically: at every moment the folder loads as the old or as the new one.

One file determines how a folder is loaded: ``model.safetensors``, else ``model.safetensors.index.json``, else the
legacy names (`bigmodel.sources.index.find_checkpoint_file`; transformers does the same). New files are written to a
temporary subfolder, and shards are moved out under unused names. A single rename, or the removal of the file that takes
precedence, then activates them. Old files are removed last.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path

from ..atomic_files import sync_folder
from ..errors import CheckpointError
from ..sources.index import (
    INDEX_FILE,
    LEGACY_INDEX_FILE,
    LEGACY_SINGLE_FILE,
    SINGLE_FILE,
    choose_checkpoint_file,
    read_index,
)

_PREFIX = ".saving-"
_SHARD = re.compile(r"(model|pytorch_model)(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.(safetensors|bin)")


class Replacement:
    """The files of a new checkpoint. A context manager, which removes them on exit unless they were committed.

    Args:
        folder: the folder of the checkpoint; must exist.
        safe: whether its files are safetensors; otherwise legacy ``.bin`` files.

    Raises:
        CheckpointError: another file in the folder would be loaded instead of the new ones.
    """

    def __init__(self, folder: Path, safe: bool) -> None:
        self.folder = folder
        self.safe = safe
        self._single = SINGLE_FILE if safe else LEGACY_SINGLE_FILE
        self._index = INDEX_FILE if safe else LEGACY_INDEX_FILE
        self._shards: list[str] = []
        self._beside: list[str] = []
        self._has_index = False
        self._old = self._old_files()
        self._refuse_if_hidden()
        self._temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

    def shard_names(self, count: int) -> list[str]:
        """Return names for `count` files of weights; names of several files are unused in the folder."""
        if count == 1:
            self._shards = [self._single]
            return self._shards
        stem, _, suffix = self._single.rpartition(".")
        tag = ""
        while True:
            names = [f"{stem}{tag}-{i + 1:05}-of-{count:05}.{suffix}" for i in range(count)]
            if not any((self.folder / name).exists() for name in names):
                self._shards = names
                return names
            tag = f"-{uuid.uuid4().hex[:8]}"

    def path(self, name: str) -> Path:
        """Return the temporary path of the file `name`."""
        return self._temporary / name

    def write_index(self, content: bytes) -> None:
        """Write the index of several shards."""
        self._has_index = True
        self._write(self._index, content)

    def write_beside(self, name: str, content: bytes) -> None:
        """Write a small file that is moved into place just before the weights."""
        self._beside.append(name)
        self._write(name, content)

    def commit(self) -> None:
        """Make the folder load as the new checkpoint, and remove the files of the old one."""
        if self._has_index:
            for name in self._shards:
                os.rename(self.path(name), self.folder / name)
            sync_folder(self.folder)
        for name in self._beside:
            os.replace(self.path(name), self.folder / name)
        entry = self._index if self._has_index else self._single
        os.replace(self.path(entry), self.folder / entry)
        sync_folder(self.folder)
        new = {entry, *self._shards, *self._beside}
        # Files with precedence over the new entry; the first one last, as the old checkpoint counts until it is gone.
        for name in (INDEX_FILE, SINGLE_FILE) if not self.safe else (SINGLE_FILE,):
            if name not in new and name in self._old:
                os.unlink(self.folder / name)
        sync_folder(self.folder)
        self._clean(new)

    def _clean(self, new: set[str]) -> None:
        for name in sorted(self._old - new):
            if os.path.lexists(self.folder / name):
                os.unlink(self.folder / name)
        for leftover in self.folder.glob(f"{_PREFIX}*"):  # of an interrupted save
            shutil.rmtree(leftover, ignore_errors=True)
        sync_folder(self.folder)

    def _old_files(self) -> set[str]:
        """Return the files of an older checkpoint to be removed: safetensors, and those of the same format."""
        present = {entry.name for entry in self.folder.iterdir() if entry.is_file() or entry.is_symlink()}
        formats = [(SINGLE_FILE, INDEX_FILE, ".safetensors")]
        if not self.safe:
            formats.append((LEGACY_SINGLE_FILE, LEGACY_INDEX_FILE, ".bin"))
        old: set[str] = set()
        for single, index, suffix in formats:
            old |= {single, index} | {name for name in present if _SHARD.fullmatch(name) and name.endswith(suffix)}
            if index in present:
                # An index may name any file of its folder; only files of weights are removed.
                old |= {name for name in _named_in(self.folder / index) if name.endswith(suffix)}
        return old & present

    def _refuse_if_hidden(self) -> None:
        present = {entry.name for entry in self.folder.iterdir() if entry.is_file()} - self._old
        chosen = choose_checkpoint_file({*present, self._single}, str(self.folder))
        if chosen != self._single:
            raise CheckpointError(
                f"{self.folder}: holds {chosen}, which would be loaded instead of {self._single}; "
                "save with safe_serialization=True, or to another folder"
            )

    def _write(self, name: str, content: bytes) -> None:
        with self.path(name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _named_in(index: Path) -> set[str]:
    """Return the files that an older index names; none if it is damaged."""
    try:
        return set(read_index(index).values())
    except CheckpointError:
        return set()

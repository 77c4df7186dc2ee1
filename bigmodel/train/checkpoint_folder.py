"""Folders of training checkpoints, written atomically even if processes are killed.

A new folder is written under a temporary name and renamed when all its files are on disk. If the folder exists already
(perhaps with other files in it), the new content is written to a folder inside it. The list of files to move is written
last and commits the new checkpoint; `recover` completes the moves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigmodel.atomic_files import sync_folder, written_atomically
from bigmodel.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from bigmodel.train.collectives import gather_object
from bigmodel.train.state.ranks import RankOperations

_PARTIAL = ".partial"
_MOVES = ".moves.json"
_CONTENT = "checkpoint.json"
_NUMBER = re.compile(r"checkpoint_(\d+)")


@contextmanager
def replaced(target: Path, ranks: RankOperations, writes: bool) -> Iterator[Path]:
    """Yield a folder for every process to write in; it becomes `target` when all have written.

    Args:
        target: the checkpoint's folder. Processes may name different folders.
        writes: whether this process makes and moves the folder for all that name it.

    Raises:
        CheckpointError: another process failed. `target` is as it was, or `recover` makes it the new checkpoint.
    """
    failure = f"{target} was not written"
    inside = target.is_dir()
    partial = target / _PARTIAL if inside else target.with_name(f".{target.name}{_PARTIAL}")
    ranks.wait_for_everyone()  # all processes have checked whether the folder exists
    with raise_on_all(failure):
        if writes:
            _begin(partial, target, inside)
    try:
        with raise_on_all(failure):
            yield partial
    except Exception:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with raise_on_all(failure):
        if writes:
            _commit(partial, target, inside)


@contextmanager
def raise_on_all(failure: str) -> Iterator[None]:
    """Raise on every process when the body raises on one. Every process must enter it.

    The body may call collectives, but must not raise before one that the other processes wait in.

    Args:
        failure: beginning of the message on the other processes: what was not done.

    Raises:
        CheckpointError: the body raised on another process.
    """
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:
        own = error
        raise
    finally:
        if own is None or isinstance(own, Exception):
            _agree(own, failure)


def _agree(own: BaseException | None, failure: str) -> None:
    reports = gather_object([None if own is None else f"{type(own).__name__}: {own}"])
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if failed and own is None:
        rank, report = next(iter(failed.items()))
        raise CheckpointError(f"{failure}: process {rank} failed with {report}")


def _begin(partial: Path, target: Path, inside: bool) -> None:
    if inside:
        recover(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _commit(partial: Path, target: Path, inside: bool) -> None:
    for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    if not inside:
        os.rename(partial, target)
        sync_folder(target.parent)
        return
    moves = sorted(path.name for path in partial.iterdir())
    obsolete = [name for name in _content(target) if name not in moves]
    _write_json({"move": moves, "remove": obsolete}, target / _MOVES)
    sync_folder(target)
    recover(target)


def recover(target: Path) -> None:
    """Complete the moves of a process that was killed, and remove content that it had not finished writing."""
    journal = target / _MOVES
    if journal.is_file():
        work = _read_json(journal)
        for name in _own_names(work.get("remove")):
            _remove(target / name)
        for name in _own_names(work.get("move")):
            source = target / _PARTIAL / name
            if source.exists():
                if source.is_dir():
                    _remove(target / name)
                os.replace(source, target / name)
        sync_folder(target)
        journal.unlink()
    if target.is_dir():
        shutil.rmtree(target / _PARTIAL, ignore_errors=True)


def describe(folder: Path, description: dict[str, object]) -> None:
    """Write a description of a checkpoint's content; called last, on one process."""
    names = [*sorted(path.name for path in folder.iterdir()), _CONTENT]
    _write_json({**description, "files": names}, folder / _CONTENT)


def description_of(folder: Path) -> dict[str, object]:
    """Return the description that `describe` wrote; {} for checkpoints of other libraries."""
    path = folder / _CONTENT
    return _read_json(path) if path.is_file() else {}


def number_of(folder: Path) -> int | None:
    """Return n for a folder named checkpoint_<n>."""
    found = _NUMBER.fullmatch(folder.name)
    return int(found[1]) if found else None


def newest(parent: Path) -> Path:
    """Return the checkpoint with the highest number. Raises CheckpointNotFoundError when there is none."""
    numbered = _numbered(parent)
    if not numbered:
        raise CheckpointNotFoundError(f"there is no checkpoint in {parent}")
    return numbered[-1]


def remove_oldest(parent: Path, limit: int) -> None:
    """Keep the `limit` checkpoints with the highest numbers."""
    for leftover in parent.glob(".*.removed"):
        shutil.rmtree(leftover)
    for folder in _numbered(parent)[:-limit]:
        removed = folder.with_name(f".{folder.name}.removed")  # renamed first, since removing takes time
        os.rename(folder, removed)
        shutil.rmtree(removed)


def _numbered(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    folders = [(number_of(path), path) for path in parent.iterdir() if path.is_dir()]
    return [path for _, path in sorted((number, path) for number, path in folders if number is not None)]


def _content(target: Path) -> list[str]:
    """Return the names of the files of the checkpoint in `target`."""
    return _own_names(description_of(target).get("files"))


def _own_names(names: object) -> list[str]:
    """Return those of `names`, which come from an untrusted file, that are directly in the folder."""
    given = [str(name) for name in names] if isinstance(names, list) else []
    return [name for name in given if name not in ("", "..") and Path(name).name == name]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointFormatError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def _write_json(content: object, path: Path) -> None:
    with written_atomically(path) as file:
        file.write(json.dumps(content, indent=2).encode())

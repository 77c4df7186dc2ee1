"""Folders that hold a whole training checkpoint, or none: whatever kills whichever process, at whatever moment.

A new folder is written beside its final name and renamed when everything in it is on the disk. Where the folder is
there already (with, perhaps, files of others in it), its new content is written to a folder inside it; the list of what
is to be moved, written last, is the moment from which the new checkpoint counts, and `recover` finishes the moving.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.train.files import sync_folder, written_atomically
from bigmodel.train.operations import gather_object
from bigmodel.train.state import RankOperations

_PARTIAL = ".partial"
_MOVES = ".moves.json"
_CONTENT = "checkpoint.json"
_NUMBER = re.compile(r"checkpoint_(\d+)")


@contextmanager
def replaced(target: Path, ranks: RankOperations, writes: bool) -> Iterator[Path]:
    """Yield a folder for every process to write in; it becomes `target` when all have written.

    Args:
        target: the checkpoint's folder.
        writes: whether this process makes and moves folders for all.

    Raises:
        CheckpointError: another process failed. `target` is as it was.
    """
    inside = target.is_dir()
    partial = target / _PARTIAL if inside else target.with_name(f".{target.name}{_PARTIAL}")
    ranks.wait_for_everyone()
    if writes:
        if inside:
            recover(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.wait_for_everyone()
    failure: BaseException | None = None
    try:
        yield partial
    except BaseException as error:
        failure = error
        raise
    finally:
        if failure is None or isinstance(failure, Exception):
            _agree(failure, ranks, partial if writes else None)
    if writes:
        _commit(partial, target, inside)
    ranks.wait_for_everyone()


def _agree(failure: BaseException | None, ranks: RankOperations, partial: Path | None) -> None:
    """Let all processes fail where one has."""
    reports = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)
    if failure is None:
        rank, report = next(iter(failed.items()))
        raise CheckpointError(f"nothing was saved: process {rank} failed with {report}")


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
    """Finish what a process that was killed had begun to move, and drop what it had not finished writing."""
    journal = target / _MOVES
    if journal.is_file():
        work = json.loads(journal.read_text())
        for name in work["remove"]:
            _remove(target / name)
        for name in work["move"]:
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
    """Write what a checkpoint holds; called last, on one process."""
    names = [*sorted(path.name for path in folder.iterdir()), _CONTENT]
    _write_json({**description, "files": names}, folder / _CONTENT)


def description_of(folder: Path) -> dict[str, object]:
    """Return what `describe` wrote; nothing for checkpoints of other libraries."""
    path = folder / _CONTENT
    return dict(json.loads(path.read_text())) if path.is_file() else {}


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
        removed = folder.with_name(f".{folder.name}.removed")  # out of the list at once, then at leisure
        os.rename(folder, removed)
        shutil.rmtree(removed)


def _numbered(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    folders = [(number_of(path), path) for path in parent.iterdir() if path.is_dir()]
    return [path for _, path in sorted((number, path) for number, path in folders if number is not None)]


def _content(target: Path) -> list[str]:
    """Names that the checkpoint in `target` is made of; none that lead elsewhere."""
    names = description_of(target).get("files", [])
    return [str(name) for name in names if Path(str(name)).name == name]  # type: ignore[attr-defined]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_json(content: object, path: Path) -> None:
    with written_atomically(path) as file:
        file.write(json.dumps(content, indent=2).encode())

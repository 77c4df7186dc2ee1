"""Files of prompt blocks: complete or not used, those of one model, within their bytes, least recently used first."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.engine.kv import prefix_files
from bigmodel.server.engine.kv.arena import KVArena, PagedKV
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV, TokenPool
from bigmodel.server.engine.kv.prefix import PrefixCache
from bigmodel.server.engine.kv.prefix_files import BlockFile, HostBlock, PrefixFiles
from tests.examples import few
from tests.preloaded import Program

B = PROMPT_BLOCK
MANY = 1 << 30


def block(seed: int, dtype: torch.dtype = torch.bfloat16) -> HostBlock:
    """A block of two layers, with keys and values of different widths."""
    torch.manual_seed(seed)
    layers = {layer: (torch.randn(2, B, 3).to(dtype), torch.randn(2, B, 5).to(dtype)) for layer in (0, 7)}
    return HostBlock.copy_of(layers)


def write(files: PrefixFiles, prompt: list[int], seeds: list[int]) -> list[BlockFile]:
    """Write one block for each seed and wait for the files."""
    written = files.of(prompt, len(seeds))
    for file, seed in zip(written, seeds, strict=True):
        files.write(file, block(seed))
    files.close()
    return written


def equal(found: HostBlock | None, wanted: HostBlock) -> bool:
    return (
        found is not None
        and found.devices == wanted.devices
        and found.layers.keys() == wanted.layers.keys()
        and all(torch.equal(a, b) for layer in wanted.layers for a, b in zip(found.layers[layer], wanted.layers[layer]))
    )


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_later_process_reads_the_bits_that_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = files.of(list(range(B)), 1)
    files.write(file, block(1, dtype))
    files.close()
    later = PrefixFiles(tmp_path, MANY, "a model")
    assert later.has(file)
    found = later.read(file)
    assert found is not None
    assert found.layers[7][1].dtype == dtype
    wanted = block(1, dtype)
    bits = [tensor.view(torch.uint8) for made in (found, wanted) for pair in made.layers.values() for tensor in pair]
    assert all(torch.equal(a, b) for a, b in zip(bits[:4], bits[4:], strict=True))
    assert (later.restored, later.refused) == (B, 0)


def test_adapters_have_files_of_their_own(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    prompt = list(range(2 * B))
    each = [files.of(prompt, 2, adapter) for adapter in ("", "a" * 64, "b" * 64)]
    assert len({file.name for own in each for file in own}) == 6
    assert [file.name for file in files.of(prompt, 2)] == [file.name for file in each[0]]


def test_a_block_is_written_where_it_belongs() -> None:
    kv = SequenceKV()
    kv.reserve(3 * B)
    made = block(1)
    made.put_into(kv, 2)
    key, value = kv.span(7, 2 * B, 3 * B)
    assert torch.equal(key, made.layers[7][0])
    assert torch.equal(value, made.layers[7][1])


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=2 * B, max_size=3 * B), st.integers(0, 3 * B - 1), st.integers(4, 9))
@settings(max_examples=few(15))
def test_names_change_from_the_first_other_token_on(prompt: list[int], place: int, other: int) -> None:
    files = PrefixFiles.__new__(PrefixFiles)  # names need no folder
    files._folder = Path("identity")
    changed = list(prompt)
    changed[min(place, len(prompt) - 1)] = other
    same = min(place, len(prompt) - 1) // B
    before, after = ([file.name for file in files.of(each, 2)] for each in (prompt, changed))
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    (file,) = write(PrefixFiles(tmp_path, MANY, "a model"), [1] * B, [1])
    other = PrefixFiles(tmp_path, MANY, "another model")
    assert other.read(file) is None
    assert other.of([1] * B, 1)[0].name != file.name


def test_a_torn_or_changed_file_is_refused_and_deleted(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = write(files, [1] * B, [1])
    (path,) = paths(tmp_path)
    whole = path.read_bytes()
    spoiled = [whole[:length] for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1)]
    spoiled += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 97)]
    for count, content in enumerate(spoiled, 1):
        path.write_bytes(content)
        assert files.read(file) is None, count
        assert files.refused == count
        assert not path.exists()
    path.write_bytes(whole)
    assert equal(files.read(file), block(1))


def test_the_file_of_another_block_is_refused(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    first, second = write(files, [1] * B + [2] * B, [1, 2])
    for path in paths(tmp_path):
        if path.stem == first.name:
            shutil.copy(path, path.with_stem(second.name))
    assert files.read(second) is None
    assert equal(files.read(first), block(1))


def test_the_folder_keeps_to_its_bytes_and_beginnings_outlive_what_follows(tmp_path: Path) -> None:
    one = PrefixFiles(tmp_path / "one", MANY, "a model")
    write(one, [1] * B, [1])
    size = sum(path.stat().st_size for path in paths(tmp_path / "one"))
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    old = write(PrefixFiles(folder, 4 * size, "an older model"), [3] * B, [3])
    for path in folder.rglob(f"{old[0].name}*"):
        os.utime(path, (1, 1))
    files = PrefixFiles(folder, 4 * size, "a model")
    a = write(files, [1] * 3 * B, [1, 2, 3])
    b = write(files, [2] * B, [4])  # the older model's has to go
    assert [files.has(file) for file in (*a, *b)] == [True] * 4
    assert not list(folder.rglob(f"{old[0].name}*"))
    for file in files.of([1] * 3 * B, 3):
        assert files.read(file) is not None
    c = write(files, [4] * 2 * B, [5, 6])  # b was used least recently, then the end of a
    assert [files.has(file) for file in (*a, *b, *c)] == [True, True, False, False, True, True]
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) <= 4 * size
    assert (folder / "notes.txt").read_text() == "mine"


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    write(PrefixFiles(tmp_path / "kept", MANY, "a model"), [1] * B, [1])
    (path,) = paths(tmp_path / "kept")
    assert [stat.stat().st_mode & 0o777 for stat in (path, path.parent, tmp_path / "kept")] == [0o600, 0o700, 0o700]


def test_what_a_killed_process_has_left_is_deleted(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = write(files, [1] * B, [1])
    (path,) = paths(tmp_path)
    fresh, stale = path.with_name(".a.1.tmp"), path.with_name(".b.2.tmp")
    for left in (fresh, stale):
        left.write_bytes(b"begun")
    os.utime(stale, (1, 1))
    PrefixFiles(tmp_path, MANY, "a model")
    assert paths(tmp_path) == sorted([fresh, path])
    assert files.has(file)


WRITER = """
import sys
from pathlib import Path
from tests.server.engine.kv.test_prefix_files import block
from bigmodel.server.engine.kv.prefix_files import PrefixFiles
files = PrefixFiles(Path(sys.argv[1]), 1 << 30, "a model")
index = 0
while True:
    for file in files.of([index] * 128, 1):
        files.write(file, block(index))
    index += 1
    while not files.accepts or index - len(list(files._folder.glob("*.safetensors"))) > 3:
        pass
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_complete_files(tmp_path: Path) -> None:
    program = Program(["-c", WRITER, str(tmp_path)], {**os.environ})
    deadline = time.monotonic() + 60
    while len(paths(tmp_path)) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    program.wait(60)
    files = PrefixFiles(tmp_path, MANY, "a model")
    found = 0
    for index in range(1000):
        (file,) = files.of([index] * B, 1)
        if files.has(file):
            assert equal(files.read(file), block(index))
            found += 1
    assert found >= 19
    assert files.refused == 0


def test_blocks_that_wait_hold_no_page_that_memory_has_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, arena, pool = PrefixFiles(tmp_path, MANY, "a model"), KVArena(2 * B), TokenPool(2 * B)
    cache = PrefixCache(pool, files=files)
    kv = PagedKV(arena)
    kv.reserve(B)
    kv.write(0, 0, torch.randn(2, B, 3), torch.randn(2, B, 3))
    cache.insert(kv, [1] * B)
    del kv
    monkeypatch.setattr(prefix_files, "WAITING_BYTES", 0)
    cache.write()
    assert cache.unwritten
    cache.clear()
    assert (pool.free, len(arena.free)) == (2 * B, 2)
    monkeypatch.undo()
    cache.close()
    assert not paths(tmp_path)


def test_the_end_waits_for_what_is_written_and_holds_no_more_than_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "WAITING_BYTES", 1)
    files = PrefixFiles(tmp_path, MANY, "a model")
    cache = PrefixCache(TokenPool(8 * B), files=files)
    kv = SequenceKV()
    kv.reserve(8 * B)
    kv.write(0, 0, torch.randn(2, 8 * B, 3), torch.randn(2, 8 * B, 3))
    cache.insert(kv, [1] * 8 * B)
    most, write = 0, files.write

    def watched(file: BlockFile, block: HostBlock) -> None:
        nonlocal most
        write(file, block)
        most = max(most, files._waiting_bytes // block.nbytes)

    monkeypatch.setattr(files, "write", watched)
    cache.close()
    assert len(paths(tmp_path)) == 8
    assert most == 1


def test_a_folder_that_takes_no_more_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    held = files._folder.rename(tmp_path / "elsewhere")
    names = write(files, [1] * 2 * B, [1, 2])
    assert isinstance(files.failure, OSError)
    assert [record.message for record in caplog.records if "could not be written" in record.message].__len__() == 1
    assert files.read(names[0]) is None
    held.rename(files._folder)
    assert equal(files.read(write(files, [1] * B, [1])[0]), block(1))
    assert files.failure is None
    assert files.accepts


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("operation", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_any_point_of_writing_leaves_nothing_behind(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    monkeypatch.setattr(os, operation, failing(number))
    first, second = write(files, [1] * 2 * B, [1, 2])
    monkeypatch.undo()
    assert not paths(tmp_path)
    assert files.read(first) is None
    (said,) = warnings(caplog)
    assert os.strerror(number) in said
    write(files, [1] * 2 * B, [1, 2])
    assert equal(files.read(second), block(2))


def test_a_folder_that_has_become_read_only_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = write(files, [1] * B, [1])
    for operation in ("utime", "unlink", "replace"):
        monkeypatch.setattr(os, operation, failing(errno.EROFS))
    assert equal(files.read(file), block(1))
    assert (files.refused, warnings(caplog)) == (0, [])


def test_a_folder_that_cannot_be_looked_into_has_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = write(files, [1] * B, [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing(errno.EACCES))
        found = files.has(file)
    assert not found
    assert files.has(file)


def test_a_file_that_cannot_be_opened_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    (file,) = write(files, [1] * B, [1])
    with monkeypatch.context() as patch:
        patch.setattr(prefix_files, "safe_open", failing(errno.EMFILE))
        assert [files.read(file) for _ in range(3)] == [None] * 3
    (said,) = warnings(caplog)
    assert os.strerror(errno.EMFILE) in said
    assert files.refused == 0
    assert equal(files.read(file), block(1))


def test_whatever_fails_in_writing_one_block_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrefixFiles(tmp_path, MANY, "a model")
    right, begun = prefix_files.save, iter([MemoryError()])

    def save(*args: Any) -> bytes:
        for error in begun:
            raise error
        return right(*args)

    monkeypatch.setattr(prefix_files, "save", save)
    first, second = write(files, [1] * 2 * B, [1, 2])
    assert (files.has(first), files.has(second)) == (False, True)
    assert files.accepts


@pytest.mark.slow
def test_two_processes_keep_to_the_bytes_of_a_folder_together(tmp_path: Path) -> None:
    write(PrefixFiles(tmp_path / "one", MANY, "a model"), [1] * B, [1])
    size = sum(path.stat().st_size for path in paths(tmp_path / "one"))
    folder, most = tmp_path / "shared", 32 * size
    both = [PrefixFiles(folder, most, "a model") for _ in range(2)]
    for number in range(30):
        for which, files in enumerate(both):
            write(files, [number, which] * (B // 2), [1])
            assert sum(path.stat().st_size for path in paths(folder)) <= most + 2 * most // prefix_files.SCANS


def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ServeError, match="cannot be used"):
            PrefixFiles(folder, MANY, "a model")

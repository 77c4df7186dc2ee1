"""`bigmodel serve` with keys and values on disk: what is left of them when its process is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bigmodel.server.engine import EngineOptions
from bigmodel.server.engine.budget import planned_chunk
from bigmodel.server.loading import PlannedModel
from tests.cli.test_serve_process import Served, serving
from tests.server.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.virtual_only("a process with a virtual accelerator"), pytest.mark.usefixtures("accelerators")]

CONTEXT, PROMPT = 1024, "the cat sat on the mat " * 50
OPTIONS = EngineOptions(max_sequences=2, max_batch_tokens=128)
SHAPES: Any = {
    "context_length": CONTEXT,
    "batch_size": 2,
    "padded": False,
    "prefill_chunk_size": planned_chunk(OPTIONS, 2),
}
"""As the command plans for them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    tiny_model(**sizes, max_position_embeddings=CONTEXT).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def budgets(folder: Path) -> str:
    """Budgets with which older keys and values go to the disk."""
    model = PlannedModel(str(folder), SHAPES)
    resident = model.plan({0: 512 << 20, "cpu": 1 << 30}).devices[0]
    accelerator = int(resident.total - 0.6 * resident.kv_cache)
    host = model.plan({0: accelerator, "cpu": 1 << 30}).devices["cpu"]
    return f"0={accelerator},cpu={int(host.total - 0.25 * host.kv_cache)}"


def open_files(served: Served, there: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes on the disk of the files of a folder that a server has open."""
    for descriptor in Path(f"/proc/{served.process.pid}/fd").iterdir():
        if os.readlink(descriptor).startswith(str(there)):
            yield os.readlink(descriptor), descriptor.stat().st_blocks * 512


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_left_of_a_killed_server_and_the_next_one_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "offload"
    monkeypatch.setenv("BIGMODEL_VIRTUAL", "1x512MiB")
    shapes = ["--max-model-len", str(CONTEXT), "--max-sequences", "2", "--max-batch-tokens", "128", "--no-prefix-cache"]
    given: Any = {"memory": budgets(folder)}
    arguments = ["--offload-folder", str(there), *shapes]
    with serving(folder, tmp_path / "log", *arguments, **given) as served:
        expected = served.complete(PROMPT, max_tokens=4, temperature=0).json()["choices"][0]["text"]

        def asks() -> None:
            with pytest.raises(httpx.TransportError):
                served.complete(PROMPT, max_tokens=100)

        waits = [threading.Thread(target=asks) for _ in range(2)]  # RAM has not enough for both
        for each in waits:
            each.start()
        while not any(size for _, size in open_files(served, there)):
            time.sleep(0.01)
        assert all(name.endswith(" (deleted)") for name, _ in open_files(served, there))
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(60)
        for each in waits:
            each.join(60)
    assert not os.listdir(there)
    with serving(folder, tmp_path / "log2", *arguments, **given) as served:
        found = served.complete(PROMPT, max_tokens=4, temperature=0).json()["choices"][0]["text"]
        assert found == expected

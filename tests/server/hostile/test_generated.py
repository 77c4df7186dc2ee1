"""A few hundred hostile requests, drawn by seed, against a running process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from bigmodel.benchmarks.hostile import ALLOWED, Attack, send
from bigmodel.benchmarks.hostile_requests import COMPLETIONS, KINDS, draw, largest_bodies, post
from tests.cli.test_serve_process import serving
from tests.server.tiny import tiny_model, tiny_tokenizer


@pytest.mark.slow
def test_hostile_requests_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with serving(folder, tmp_path / "log", "--request-timeout", "30", "--log-level", "warning") as served:
        port = int(served.url.rpartition(":")[2])
        before = served.complete(max_tokens=8, temperature=0).json()["choices"]
        statuses: Counter[int] = Counter()
        rng = random.Random(0)
        left = iter(range(200))

        async def client() -> None:
            for _ in left:
                attack = draw(rng, "tiny", largest=100_000)
                status, body = await send(port, attack)
                statuses[status] += 1
                assert status < 500 or status in ALLOWED, (attack.kind, attack.raw[:1000], body)
                assert status < 400 or len(body) <= 1024, attack.kind

        async def crowd() -> None:
            await asyncio.gather(*(client() for _ in range(8)))

        asyncio.run(crowd())
        assert served.status("health") == 200
        assert served.complete(max_tokens=8, temperature=0).json()["choices"] == before
        assert served.process.poll() is None
        assert "Traceback" not in served.said()
    assert len(statuses) > 3, statuses


@pytest.mark.parametrize("name", largest_bodies("tiny", 100))
def test_large_bodies_of_every_sort_are_answered_in_few_bytes(name: str, url: str) -> None:
    port = int(url.rpartition(":")[2])
    body = largest_bodies("tiny", 150_000)[name]
    status, answer = asyncio.run(send(port, Attack(name, post(COMPLETIONS, body))))
    assert status in (400, 404, 413, 422), answer
    assert len(answer) <= 1024


def test_every_kind_is_drawn_and_a_seed_draws_the_same() -> None:
    drawn = [[draw(random.Random(seed), "tiny", largest=1000) for seed in range(300)] for _ in range(2)]
    assert {attack.kind for attack in drawn[0]} == set(KINDS)
    assert drawn[0] == drawn[1]

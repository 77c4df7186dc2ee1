"""A few hundred hostile requests, drawn by seed, against a running process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from bigmodel.benchmarks.hostile import ALLOWED, Attack, send
from bigmodel.benchmarks.hostile_requests import COMPLETIONS, KINDS, draw, largest_bodies, post
from tests.server.http.test_run import process, wait_ready

ASKED = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_hostile_requests_change_nothing(seed: int) -> None:
    with process(0, 0) as (child, url):
        wait_ready(url)
        port = int(url.rpartition(":")[2])
        before = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).json()["choices"]
        statuses: Counter[int] = Counter()
        rng = random.Random(seed)
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
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).json()["choices"] == before
        assert child.process.poll() is None
        assert "Traceback" not in child.log.read_text()
    assert len(statuses) > 3, statuses


@pytest.mark.parametrize("name", largest_bodies("tiny", 100))
def test_large_bodies_of_every_sort_are_answered_in_few_bytes(name: str, url: str) -> None:
    port = int(url.rpartition(":")[2])
    body = largest_bodies("tiny", 150_000)[name]
    status, answer = asyncio.run(send(port, Attack(name, post(COMPLETIONS, body))))
    assert status in (400, 413, 422), answer
    assert len(answer) <= 1024


def test_every_kind_is_drawn_and_a_seed_draws_the_same() -> None:
    drawn = [[draw(random.Random(seed), "tiny", largest=1000) for seed in range(300)] for _ in range(2)]
    assert {attack.kind for attack in drawn[0]} == set(KINDS)
    assert drawn[0] == drawn[1]

"""Keys with names and limits: in a file, by their hashes, and over HTTP."""

from __future__ import annotations

import hashlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.errors import ServeError
from bigmodel.server.http import keys as module
from bigmodel.server.http.keys import ApiKey, KeyRing, TooMuchError, new_key, parse_keys
from tests.server.live import serving, tiny_app

HASH = hashlib.sha256(b"secret").hexdigest()


class Clock:
    """Stands in for `time` in the module."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_file_has_keys_as_they_are_and_as_hashes() -> None:
    text = f"# ours\nplain\n\nother name=bob tokens=9\nsha256:{HASH} name=alice requests=60 tokens=100000\n"
    plain, bob, alice = parse_keys(text, "keys")
    assert plain == ApiKey.of("plain")
    assert plain.name == "key-" + hashlib.sha256(b"plain").hexdigest()[:8]
    assert bob == ApiKey.of("other", "bob", tokens=9)
    assert alice == ApiKey(HASH, "alice", 60, 100000)
    assert parse_keys(alice.line(), "keys") == (alice,)
    ring = KeyRing([plain, bob, alice])
    assert [ring.find(sent) for sent in (b"secret", b"plain")] == [alice, plain]
    assert [ring.find(sent) for sent in (b"Plain", b"", HASH.encode())] == [None] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sha256:12 name=a", "64 hexadecimal digits"),
        (f"sha256:{HASH.upper()}", "64 hexadecimal digits"),
        ("top-secret name=a b", "each once and without spaces"),
        ("top-secret name=a name=b", "each once"),
        ("top-secret limit=3", "name=, requests= and tokens="),
        ("top-secret requests=0", "from 1 on"),
        ("top-secret requests=-1", "from 1 on"),
        ("top-secret tokens=many", "from 1 on"),
        ("top-secret tokens=" + "9" * 30, "from 1 on"),
        ("top-secret name=a/b", "a name has"),
        ("top-secret name=a\ntop-secret2 name=a", "stands above already"),
        ("top-secret name=a\ntop-secret name=b", "stands above already"),
        ("# nothing\n", "no key"),
    ],
)
def test_a_wrong_line_is_one_error_that_quotes_no_key(line: str, message: str) -> None:
    with pytest.raises(ServeError, match=message) as raised:
        parse_keys(line, "keys")
    assert "top-secret" not in str(raised.value)


def test_a_new_key_is_random_and_found_by_its_hash() -> None:
    key, kept = new_key("alice", 3, None)
    assert key != new_key("alice")[0]
    assert key not in kept.line()
    assert KeyRing(parse_keys(kept.line(), "keys")).find(key.encode()) == kept
    with pytest.raises(ServeError, match="a name has"):
        new_key("a b")


def test_requests_flow_back_in_a_minute(clock: Clock) -> None:
    ring = KeyRing([ApiKey.of("a", "a", requests=3), ApiKey.of("b", "b")])
    for _ in range(3):
        ring.take_request("a")
    assert ring.headers("a") == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    with pytest.raises(TooMuchError) as raised:
        ring.take_request("a")
    assert str(raised.value) == "the key a has taken its 3 requests of a minute; try again in 20.0 seconds"
    clock.now += 20
    ring.take_request("a")
    clock.now += 3600
    for _ in range(3):
        ring.take_request("a")
    with pytest.raises(TooMuchError):
        ring.take_request("a")
    ring.take_request("b")  # without limits, whatever others take
    assert ring.headers("b") == {}


def test_tokens_beyond_the_limit_are_missing_afterwards(clock: Clock) -> None:
    ring = KeyRing([ApiKey.of("a", "a", tokens=600)])
    ring.take_request("a")
    ring.take_tokens("a", 1200)
    with pytest.raises(TooMuchError) as raised:
        ring.take_request("a")
    assert "its 600 tokens of a minute; try again in 60.1 seconds" in str(raised.value)
    clock.now += 61
    ring.take_request("a")


def test_requests_that_leave_a_share_to_others_are_refused_while_there_is_less(clock: Clock) -> None:
    ring = KeyRing([ApiKey.of("a", "a", requests=8), ApiKey.of("b", "b", requests=1), ApiKey.of("c", "c", tokens=100)])
    for _ in range(4):
        ring.take_request("a", kept=0.5)
    with pytest.raises(TooMuchError) as raised:
        ring.take_request("a", kept=0.5)
    assert raised.value.seconds == 7.5  # until there is a fifth
    for _ in range(4):
        ring.take_request("a")
    ring.take_request("b", kept=0.5)
    ring.take_tokens("c", 51)
    with pytest.raises(TooMuchError):
        ring.take_request("c", kept=0.5)
    ring.take_request("c")


def test_a_key_is_found_by_its_name() -> None:
    ring = KeyRing([ApiKey.of("secret", "a")])
    assert ring.named("a") == ApiKey.of("secret", "a")
    assert ring.named("secret") is None


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), min_size=1, max_size=40), st.integers(1, 100))
def test_no_more_than_two_minutes_worth_is_let_in_within_one(steps: list[tuple[float, int]], limit: int) -> None:
    """At most a full bucket and what flows back."""
    made, clock = module.time, Clock()
    module.time = clock  # type: ignore[assignment]
    try:
        ring = KeyRing([ApiKey.of("a", "a", requests=limit)])
        taken: list[float] = []
        for wait, tries in steps:
            clock.now += wait
            for _ in range(tries):
                try:
                    ring.take_request("a")
                except TooMuchError:
                    break
                taken.append(clock.now)
    finally:
        module.time = made
    for begin in taken:
        assert sum(begin <= at < begin + 60 for at in taken) <= 2 * limit


@pytest.mark.slow
def test_a_key_beyond_its_requests_is_told_when_to_come_again() -> None:
    keys = (ApiKey.of("a", "alice", requests=2, tokens=1000), ApiKey.of("b", "bob"))
    with serving(tiny_app(api_keys=keys)) as url, httpx.Client(base_url=url) as client:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
        answers = [client.post("/v1/completions", json=body, headers={"x-api-key": "a"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert "alice has taken its 2 requests of a minute" in answers[2].json()["error"]["message"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert int(answers[1].headers["x-ratelimit-remaining-tokens"]) < 1000
        assert client.get("/v1/models", headers={"x-api-key": "a"}).status_code == 200  # what is read is not counted
        other = client.post("/v1/completions", json=body, headers={"x-api-key": "b"})
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers
        metrics = client.get("/metrics", headers={"x-api-key": "b"}).text
    used = other.json()["usage"]
    assert f'bigmodel_key_tokens_total{{key="bob",kind="prompt"}} {used["prompt_tokens"]:.1f}' in metrics
    assert f'bigmodel_key_tokens_total{{key="alice",kind="generated"}} {2 * used["completion_tokens"]:.1f}' in metrics


@pytest.mark.slow
def test_a_key_beyond_its_tokens_waits() -> None:
    app = tiny_app(api_keys=(ApiKey.of("a", "alice", tokens=5),))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 20, "ignore_eos": True}
        answers = [client.post("/v1/completions", json=body, headers={"x-api-key": "a"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "its 5 tokens of a minute" in answers[1].json()["error"]["message"]

"""Hostile requests, drawn by seed: bodies, texts, schemas, headers and disconnections that a server must survive."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 8 << 20  # bytes of a body
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MESSAGES, RESPONSES, EMBEDDINGS, RERANK = "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/rerank"


@dataclass(frozen=True)
class Attack:
    """The bytes of a request; the client ``leaves`` after the first bytes of the answer, or at once if none comes."""

    kind: str
    raw: bytes
    leaves: bool = False


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST as it goes over the wire; ``length`` announces another length than the body has."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += "".join(f"{header}\r\n" for header in headers)
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def draw(rng: random.Random, model: str, *, largest: int = LARGEST, kind: str | None = None) -> Attack:
    """Draw one request, of any kind if none is given; bodies have at most about ``largest`` bytes, most far fewer."""
    kind = kind or rng.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
    raw = _KINDS[kind][1](rng, model, largest)
    return Attack(kind, raw, kind in ("gone", "cut"))


def bomb(rng: random.Random) -> dict[str, Any]:
    """A schema that takes minutes or gigabytes where it is compiled without bounds, different each time."""
    some = rng.randrange(10**9)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "pattern": "a" * 1_000_000 + str(some)},
        lambda: {"enum": [f"{some}-{number}" for number in range(20_000)]},
        lambda: {"type": "object", "minProperties": 900, "description": str(some)},
        lambda: {"type": "string", "pattern": f"((.{{0,300}}){{0,300}}){{0,300}}{some}"},
        lambda: {"type": "string", "pattern": "(" * 10_000 + str(some) + ")" * 10_000},
    ]
    return rng.choice(kinds)()


def chat(model: str, schema: Any, **fields: Any) -> dict[str, Any]:
    """A chat whose answer has to match a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    return {"model": model, "messages": messages, "max_tokens": 4, "response_format": wanted, **fields}


# --- values -------------------------------------------------------------------------------------------


def _text(rng: random.Random, length: int) -> str:
    alphabets = [
        "ab ",
        '"\\/',
        "\x00\x01\x1f\x7f",
        "äß漢字",
        "\U0001f600\u200d\u202e",
        "\u0301",
        "\ud800\udfff",
        "{[,:]}",
    ]
    return "".join(rng.choices("".join(rng.sample(alphabets, 2)), k=length))


def _value(rng: random.Random, depth: int = 3) -> Any:
    leaves: list[Any] = [None, True, -1, 2**63, 1e308, float("nan"), float("-inf"), "", {}, []]
    if depth and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_value(rng, depth - 1) for _ in range(rng.randrange(5))]
        return {_text(rng, 3): _value(rng, depth - 1) for _ in range(rng.randrange(5))}
    return _text(rng, rng.randrange(40)) if rng.random() < 0.3 else rng.choice(leaves)


def _body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a body that is right."""
    asked = {"model": model, "max_tokens": 3, "seed": rng.randrange(99), "stream": rng.random() < 0.3, "timeout": 2.0}
    turns = [{"role": rng.choice(["user", "system", "assistant"]), "content": "1 2 3"} for _ in range(3)]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {**asked, "prompt": "1 2 3"}),
        (COMPLETIONS, {**asked, "prompt": [[1, 2], [3]], "echo": True, "logprobs": 2}),
        (CHAT, {**asked, "messages": turns}),
        (MESSAGES, _message(rng, model)),
        (RESPONSES, _response(rng, model)),
        (EMBEDDINGS, {"model": model, "input": ["1 2 3", "2"], "dimensions": 3}),
        (EMBEDDINGS, {"model": model, "input": [[1, 2, 3], [1]], "encoding_format": "base64"}),
        (TOKENIZE, {"model": model, "prompt": "1 2 3"}),
        (TOKENIZE, {"model": model, "messages": turns, "return_token_strs": True}),
        (DETOKENIZE, {"model": model, "tokens": [1, 2, 3]}),
    ]
    return rng.choice(bodies)


def _any_body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a body that is right for one model or another: some take no tools, and some rank nothing."""
    if rng.random() < 0.8:
        return _body(rng, model)
    schema = {"type": "object"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (RERANK, {"model": model, "query": "1", "documents": ["1", {"text": "2"}]}),
        (MESSAGES, {**_message(rng, model), "tools": [{"name": "f", "input_schema": schema}]}),
        (RESPONSES, {**_response(rng, model), "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
    ]
    return rng.choice(bodies)


def _message(rng: random.Random, model: str) -> dict[str, Any]:
    """A request for a message with blocks of every sort."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "1 2 3", "is_error": rng.random() < 0.5}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "1", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "3"},
    ]
    asked = {"max_tokens": 3, "stream": rng.random() < 0.3, "system": "1", "stop_sequences": ["9"]}
    return {"model": model, "messages": turns[: rng.randrange(1, 5)], **asked}


def _response(rng: random.Random, model: str) -> dict[str, Any]:
    """A request for a response with items of every sort."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "1"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "2"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]},
    ]
    asked = {"max_output_tokens": 3, "stream": rng.random() < 0.3, "instructions": "1", "metadata": {"a": "b"}}
    given: Any = "1 2 3" if rng.random() < 0.2 else items[: rng.randrange(1, 6)]
    return {"model": model, "input": given, **asked}


_FIELDS = (
    *("model", "prompt", "messages", "tokens", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "n", "stop", "seed", "stream", "stream_options", "logit_bias", "logprobs", "top_logprobs", "tools"),
    *("response_format", "tool_choice", "chat_template_kwargs", "echo", "best_of", "timeout", "user", "suffix"),
    *("presence_penalty", "repetition_penalty", "add_special_tokens", "unknown", "continue_final_message"),
    *("system", "stop_sequences", "thinking", "output_config", "metadata", "thinking_token_budget"),
    *("input", "instructions", "reasoning", "text", "include", "max_output_tokens"),
    *("dimensions", "encoding_format", "truncate_prompt_tokens", "query", "documents", "top_n", "max_tokens_per_doc"),
)


def _size(rng: random.Random, largest: int) -> int:
    """Most sizes are small: each factor of ten is equally likely up to 100 kB, and one in thirty is larger."""
    most = largest if rng.random() < 1 / 30 else min(largest, 100_000)
    return int(most ** rng.uniform(0.2, 1.0))


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=True).encode()


# --- kinds --------------------------------------------------------------------------------------------


def _good(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _body(rng, model)
    return post(path, _dumped(body))


def _types(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    return post(path, _dumped({**body, **{name: _value(rng) for name in rng.sample(_FIELDS, rng.randrange(1, 4))}}))


def _lists(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    item = rng.choice(
        ["-1", "0", "1000", "1.5e300", '""', '"a"', "[]", "[1]", "{}", "null", '{"role": "user"}', "[[[]]]"]
    )
    count = _size(rng, largest) // (len(item) + 1)
    if rng.random() < 0.3:
        given = "{" + ",".join(f'"{number}":{item}' for number in range(count // 3)) + "}"
    else:
        given = "[" + ",".join([item] * count) + "]"
    name = rng.choice(_FIELDS)
    rest = json.dumps({key: value for key, value in body.items() if key != name})
    return post(path, f'{rest[:-1]}, "{name}": {given}}}'.encode())


def _nesting(rng: random.Random, model: str, largest: int) -> bytes:
    depth = _size(rng, largest) // 6
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    deep = opening * depth + "1" + closing * (depth if rng.random() < 0.5 else 0)
    if rng.random() < 0.3:
        return post(COMPLETIONS, deep.encode())
    return post(CHAT, f'{{"model": "{model}", "messages": [], "{rng.choice(_FIELDS)}": {deep}}}'.encode())


def _unicode(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    body[rng.choice(list(body))] = _text(rng, _size(rng, min(largest, 50_000)) // 6)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return post(path, raw.replace(b"1", bytes([rng.randrange(128, 256)])) if rng.random() < 0.3 else raw)


def _numbers(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    number = rng.choice(
        ["NaN", "Infinity", "-Infinity", "1e999999", "-0", "9" * rng.randrange(1, 9000), "0." + "1" * 9000]
    )
    rest = _dumped({**body, rng.choice(_FIELDS): "HERE"})
    return post(path, rest.replace(b'"HERE"', number.encode()))


def _mutated(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    raw = bytearray(_dumped(body))
    for _ in range(rng.randrange(1, 6)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return post(path, bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw))


def _schemas(rng: random.Random, model: str, largest: int) -> bytes:
    if rng.random() < 0.01 and largest >= LARGEST:
        return post(CHAT, _dumped(chat(model, bomb(rng))))
    count = min(_size(rng, largest), 3000)
    schema = rng.choice(
        [
            {"type": "string", "pattern": "(" * count + "a" + ")" * count},
            {"enum": [str(number) for number in range(count)]},
            {"$ref": "#"},
            {"$ref": "http://example.com/schema"},
            {"type": "string", "pattern": _text(rng, 20).encode(errors="replace").decode()},
            {"properties": {_text(rng, 4): _value(rng) for _ in range(20)}},
            {"type": "string", "pattern": "(?=a)[z-a]{9999}"},
            {"anyOf": [{"type": "integer", "minimum": rng.randrange(9), "maximum": 10 ** rng.randrange(30)}] * 30},
            _value(rng),
        ]
    )
    return post(CHAT, _dumped(chat(model, schema)))


def _long(rng: random.Random, model: str, largest: int) -> bytes:
    text = rng.choice(["1 ", "a", "\U0001f600", "\n", "9999 "])
    text = (text * (_size(rng, largest) // len(text.encode()) + 1)) + rng.choice(["", "\U0001f600"])
    body: dict[str, Any] = rng.choice(
        [
            {"model": model, "prompt": text},
            {"model": model, "messages": [{"role": "user", "content": text}]},
            {"model": text, "prompt": "1"},
            {"model": model, "prompt": "1", "user": text},
        ]
    )
    path = CHAT if "messages" in body else rng.choice([COMPLETIONS, TOKENIZE])
    bounds: dict[str, Any] = {} if path == TOKENIZE else {"max_tokens": 3, "timeout": 2.0}
    return post(path, json.dumps({**body, **bounds}, ensure_ascii=False).encode())


def _gone(rng: random.Random, model: str, largest: int) -> bytes:
    body = {"model": model, "prompt": "1 2 3", "max_tokens": 400, "ignore_eos": True, "stream": rng.random() < 0.7}
    return post(COMPLETIONS, _dumped(body))


def _cut(rng: random.Random, model: str, largest: int) -> bytes:
    path, body = _any_body(rng, model)
    raw = _dumped({**body, "user": "u" * _size(rng, largest)})
    return post(path, raw[: rng.randrange(len(raw))], length=len(raw))


def _headers(rng: random.Random, model: str, largest: int) -> bytes:
    body = b'{"model": "x"}'
    long = "a" * rng.choice([10, 1000, 40_000, 200_000])
    return rng.choice(
        [
            post(COMPLETIONS, body, f"X-Long: {long}"),
            post(COMPLETIONS, body, *(f"X-{number}: 1" for number in range(rng.choice([10, 100, 5000])))),
            post(COMPLETIONS, body, f"Authorization: Bearer {long}"),
            post(COMPLETIONS, body + b"\r\n", "Transfer-Encoding: chunked"),
            post(COMPLETIONS, body, "Content-Length: 3"),
            post(COMPLETIONS, body, "Expect: 100-continue"),
            post(COMPLETIONS, body, "Content-Type: text/plain; charset=utf-7"),
            post(COMPLETIONS, body, "Content-Encoding: gzip"),
            post("/" + long, body),
            post("/v1/completions?" + long, body),
            post("/%00%ff/../..", body),
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            b"GET /health HTTP/9.9\r\n\r\n",
            b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n",
        ]
    )


_KINDS: dict[str, tuple[int, Callable[[random.Random, str, int], bytes]]] = {
    "good": (10, _good),
    "types": (20, _types),
    "lists": (12, _lists),
    "nesting": (6, _nesting),
    "unicode": (10, _unicode),
    "numbers": (6, _numbers),
    "mutated": (10, _mutated),
    "schemas": (3, _schemas),
    "long": (5, _long),
    "gone": (5, _gone),
    "cut": (4, _cut),
    "headers": (6, _headers),
}
KINDS = tuple(_KINDS)


# --- the largest bodies -------------------------------------------------------------------------------


def largest_bodies(model: str, size: int, prompt: str = "prompt") -> dict[str, bytes]:
    """Bodies of ``size`` bytes, each the worst of its sort: requests to /v1/completions, or to another route whose
    field ``prompt`` is the largest one."""

    def repeated(field: str, item: bytes, opening: bytes = b"[", closing: bytes = b"1]") -> bytes:
        name = prompt if field == "prompt" else field
        start = b'{"model": "%s", "%s": "1", "%s": ' % (model.encode(), prompt.encode(), name.encode()) + opening
        return start + item * ((size - len(start)) // len(item)) + closing + b"}"

    smile = "\U0001f600".encode()
    return {
        "tokens": repeated("prompt", b"1000,"),
        "wrong tokens": repeated("prompt", b"-1,"),
        "numbers": repeated("prompt", b"1.5e300,"),
        "long numbers": repeated("prompt", b"9" * 4000 + b","),
        "empty lists": repeated("prompt", b"[],"),
        "empty texts": repeated("stop", b'"",'),
        "members": repeated("logit_bias", b'"1":1,', b"{", b'"2":2}'),
        "objects": repeated("tools", b'{"a":1},'),
        "a text": repeated("prompt", b"1 ", b'"', b'"'),
        "a text with an emoji": repeated("prompt", b"1 ", b'"' + smile, b'"'),
        "emojis": repeated("prompt", smile, b'"', b'"'),
        "escapes": repeated("prompt", b"\\u0041", b'"', b'"'),
        "a model's name": repeated("model", b"m", b'"', b'"'),
        "brackets": repeated("prompt", b"[", b"", b""),
        "spaces": repeated("prompt", b" ", b"", b"1"),
        "texts without commas": repeated("prompt", b'""', b"[", b"]"),
        "numbers apart": repeated("prompt", b"1" * 99 + b" ", b"", b"1"),
    }


def largest_of_routes(model: str, size: int) -> dict[str, tuple[str, bytes]]:
    """Paths and bodies of ``size`` bytes at most, as many parts as each route takes, none of which is wrong."""
    turns = [{"role": role, "content": [{"type": "text", "text": "1"}] * 4} for role in ("user", "assistant")] * 4000
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "2"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
    ] * 2000
    tools = [
        {"name": f"f{number}", "input_schema": {"type": "object", "properties": {f"a{n}": {} for n in range(30)}}}
        for number in range(500)
    ]
    long = "1 " * (size // 2 - 200)
    part = "1 " * (size // 2 // 2048 - 8)
    user = [{"role": "user", "content": "1"}]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "messages": (MESSAGES, {"max_tokens": 1, "messages": turns}),
        "a message": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": long}]}),
        "tools": (MESSAGES, {"max_tokens": 1, "messages": user, "tools": tools}),
        "tokens of messages": (f"{MESSAGES}/count_tokens", {"messages": turns}),
        "items": (RESPONSES, {"input": items, "max_output_tokens": 1}),
        "instructions": (RESPONSES, {"input": "1", "instructions": long, "stream": True}),
        "texts": (EMBEDDINGS, {"input": [part] * 2048}),
        "short texts": (EMBEDDINGS, {"input": ["1"] * 2048}),
        "shortened texts": (EMBEDDINGS, {"input": [part] * 2048, "truncate_prompt_tokens": 2}),
        "tokens of texts": (EMBEDDINGS, {"input": [[1] * 12] * 2048}),
        "documents": (RERANK, {"query": "1", "documents": [{"text": part}] * 2048, "max_tokens_per_doc": 2}),
        "names of tokens": (TOKENIZE, {"prompt": long, "return_token_strs": True}),
    }
    return {name: (path, _dumped({"model": model, **body})) for name, (path, body) in asked.items()}


# --- bodies of many parts -------------------------------------------------------------------------------


def dense_bodies(model: str) -> dict[str, tuple[str, Callable[[int], bytes]]]:
    """Paths, and bodies of so many parts, each of a sort that a route takes lists of: none is wrong but by number.

    Prompts are longer than a context of 2048 tokens, so that none is computed: what that takes is in the engine's plan.
    """
    user = {"role": "user", "content": "1"}
    assistant = {"role": "assistant", "content": "1"}
    last = {"role": "user", "content": "1 " * 2048}
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {"type": "function", "function": {"name": "f"}}
    asked = {"model": model, "max_tokens": 1}

    def properties(count: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"a{number}": {} for number in range(count)}}

    bodies: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
        "messages": (CHAT, lambda n: {**asked, "messages": [user] * n + [last]}),
        "long messages": (
            CHAT,
            lambda n: {**asked, "messages": [{"role": "user", "content": "1 " * 300}] * n + [last]},
        ),
        "messages in parts": (
            CHAT,
            lambda n: {
                **asked,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "1"}]}] * n + [last],
            },
        ),
        "parts": (
            CHAT,
            lambda n: {**asked, "messages": [{"role": "user", "content": [{"type": "text", "text": "1"}] * n}, last]},
        ),
        "calls": (
            CHAT,
            lambda n: {**asked, "messages": [user, {"role": "assistant", "tool_calls": [called] * n}, last]},
        ),
        "messages with a call": (
            CHAT,
            lambda n: {**asked, "messages": [user, *[{"role": "assistant", "tool_calls": [called]}] * n, last]},
        ),
        "documents": (CHAT, lambda n: {**asked, "messages": [last], "documents": [{"a": "1"}] * n}),
        "lists in variables": (
            CHAT,
            lambda n: {**asked, "messages": [last], "chat_template_kwargs": {"a": [[] for _ in range(n)]}},
        ),
        "properties of a function": (
            CHAT,
            lambda n: {
                **asked,
                "messages": [last],
                "tools": [{**function, "function": {"name": "f", "parameters": properties(n)}}],
                "tool_choice": "none",
            },
        ),
        "properties of the answer": (CHAT, lambda n: chat(model, properties(n), max_tokens=1)),
        "values of the answer": (
            CHAT,
            lambda n: chat(model, {"enum": [f"a{number}" for number in range(n)]}, max_tokens=1),
        ),
        "tokens": (COMPLETIONS, lambda n: {**asked, "prompt": [300 + number % 7000 for number in range(n)]}),
        "prompts": (COMPLETIONS, lambda n: {**asked, "prompt": ["1"] * n}),
        "prompts of tokens": (COMPLETIONS, lambda n: {**asked, "prompt": [[300]] * n}),
        "words": (COMPLETIONS, lambda n: {**asked, "prompt": "1 " * n}),
        "biases": (
            COMPLETIONS,
            lambda n: {**asked, "prompt": "1", "logit_bias": {str(number): 1.5 for number in range(n)}},
        ),
        "turns": (MESSAGES, lambda n: {**asked, "messages": [user, assistant] * (n // 2) + [last]}),
        "long turns": (
            MESSAGES,
            lambda n: {
                **asked,
                "messages": [{**each, "content": "1 " * 300} for each in (user, assistant)] * (n // 2) + [last],
            },
        ),
        "blocks": (
            MESSAGES,
            lambda n: {**asked, "messages": [{"role": "user", "content": [{"type": "text", "text": "1"}] * n}, last]},
        ),
        "results": (
            MESSAGES,
            lambda n: {
                **asked,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}] * n},
                    assistant,
                    last,
                ],
            },
        ),
        "counted turns": (f"{MESSAGES}/count_tokens", lambda n: {"model": model, "messages": [user] * n + [last]}),
        "items": (RESPONSES, lambda n: {"model": model, "max_output_tokens": 1, "input": [user] * n + [last]}),
        "parts of items": (
            RESPONSES,
            lambda n: {
                "model": model,
                "max_output_tokens": 1,
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "1"}] * n}, last],
            },
        ),
        "results of items": (
            RESPONSES,
            lambda n: {
                "model": model,
                "max_output_tokens": 1,
                "input": [user, *[{"type": "function_call_output", "call_id": "a", "output": "1"}] * n, last],
            },
        ),
        "texts": (EMBEDDINGS, lambda n: {"model": model, "input": ["1 2"] * n}),
        "texts of tokens": (EMBEDDINGS, lambda n: {"model": model, "input": [[300, 301]] * n}),
        "ranked documents": (RERANK, lambda n: {"model": model, "query": "1", "documents": [{"text": "1"}] * n}),
        "tokenised words": (TOKENIZE, lambda n: {"model": model, "prompt": "1 " * n}),
        "words with their tokens": (
            TOKENIZE,
            lambda n: {"model": model, "prompt": "1 " * n, "return_token_strs": True},
        ),
        "tokenised messages": (TOKENIZE, lambda n: {"model": model, "messages": [user] * n + [last]}),
        "detokenised": (DETOKENIZE, lambda n: {"model": model, "tokens": [300 + number % 100 for number in range(n)]}),
    }
    return {name: (path, _counted(body)) for name, (path, body) in bodies.items()}


def _counted(body: Callable[[int], dict[str, Any]]) -> Callable[[int], bytes]:
    return lambda count: json.dumps(body(count), separators=(",", ":")).encode()

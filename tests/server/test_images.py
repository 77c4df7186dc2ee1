"""Images in chats, over HTTP: the answers are transformers' own, and what is not accepted is refused in one line."""

from __future__ import annotations

import base64
import gc
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch import from_pretrained, get_plan
from bigmodel.server import EngineOptions, Settings, create_app
from bigmodel.server.engine import Request, SamplingParams, build_engine
from bigmodel.server.loading import load
from bigmodel.server.text.images import MAX_PIXELS, ImageError, ImageSupport, decode, largest_prompt
from tests.accelerators import at
from tests.examples import alike
from tests.server.live import serving
from tests.server.tiny import Collector
from tests.server.vision import generated, loaded_processor, picture, processor, tiny_llava
from tests.server.vision_kinds import KINDS, VisionKind, built, with_template

MODEL, TOKENS = "tiny", 6
TEXT = {"input_ids": torch.ones(1, 99, dtype=torch.long)}


@contextmanager
def seeing(folder: Path, model: Any = None, processing: Any = None, **settings: Any) -> Iterator[str]:
    """URL of a server over a LLaVA or another model, loaded from its folder under a plan."""
    (model or tiny_llava()).save_pretrained(folder)
    (processing or processor()).save_pretrained(folder)
    loaded = load(str(folder), max_memory={"cpu": "4GiB"}, batch_size=4, context_length=256)
    engine = EngineOptions(max_sequences=4, max_length=256)
    app = create_app(loader=lambda progress: loaded, settings=Settings(MODEL, engine=engine, **settings))
    with serving(app) as url:
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.05)
        yield url


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that fetches no images."""
    with seeing(tmp_path_factory.mktemp("llava")) as url:
        yield url


def encoded(image: Any, kind: str = "png") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"lossless": True} if kind == "webp" else {}))
    return base64.b64encode(buffer.getvalue()).decode()


def data_url(image: Any, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{encoded(image, kind)}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(url: str, content: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=60)


@cache
def expected(prompt: str, *seeds: int) -> tuple[str, int]:
    """Transformers' own answer, and the number of the prompt's tokens."""
    images = [picture(seed) for seed in seeds]
    inputs = loaded_processor()(text=prompt, images=images, return_tensors="pt", add_special_tokens=False)
    tokens = generated(tiny_llava(), inputs, TOKENS)
    return processor().tokenizer.decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[1]


@pytest.mark.slow
@alike("kind", ["webp", "png"], first=1)
def test_an_image_is_answered_as_by_transformers(sees: str, kind: str) -> None:
    answer = chat(sees, [text("see "), part(data_url(picture(1), kind)), text(" it")]).json()
    words, tokens = expected("<user>see <image> it\n<assistant>", 1)
    assert answer["choices"][0]["message"]["content"] == words
    assert answer["usage"]["prompt_tokens"] == tokens


@pytest.mark.slow
def test_the_same_words_about_another_image_have_another_answer(sees: str) -> None:
    answers = [chat(sees, [text("see "), part(data_url(picture(seed))), text(" it")]).json() for seed in (1, 2)]
    found = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert found == [expected("<user>see <image> it\n<assistant>", seed)[0] for seed in (1, 2)]
    assert found[0] != found[1]


@pytest.mark.slow
def test_images_of_several_messages_come_in_their_order(sees: str) -> None:
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [part(data_url(picture(3))), text("a")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [text("c"), part(data_url(picture(4)))]},
    ]
    answer = chat(sees, "", messages=messages).json()["choices"][0]["message"]["content"]
    prompt = "<system>look\n<user><image>a\n<assistant>b\n<user>c<image>\n<assistant>"
    assert answer == expected(prompt, 3, 4)[0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ("gemma3", "idefics3")], ids=repr)
def test_models_of_other_kinds_answer_as_by_transformers(kind: VisionKind, tmp_path: Path) -> None:
    processing = with_template(kind)
    model = built(kind, processing.tokenizer)
    shown = [picture(1, (40, 30)), picture(2, (12, 12))]
    with seeing(tmp_path, model, processing) as url:
        answer = chat(url, [text("see "), part(data_url(shown[0])), text(" and "), part(data_url(shown[1]))]).json()
    prompt = f"<user>see {kind.image} and {kind.image}\n<assistant>"
    loaded = transformers.AutoProcessor.from_pretrained(tmp_path)
    inputs = loaded(text=prompt, images=shown, return_tensors="pt", add_special_tokens=False)
    words = processing.tokenizer.decode(generated(model, inputs, TOKENS), skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == words
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_the_largest_prompt_of_other_kinds_is_one_that_the_model_computes(kind: VisionKind) -> None:
    processing = kind.processor()
    arguments, support = largest_prompt(processing, 250)
    assert support.most == (2 if "<image>" in kind.image else 4)  # those in tiles take more of the context
    with torch.no_grad():
        logits = built(kind, processing.tokenizer)(**arguments).logits
    assert logits.shape[1] == 250


@pytest.mark.slow
def test_a_stream_has_the_same_text(sees: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{sees}/v1", api_key="none")
    content: Any = [part(data_url(picture(1))), text("x")]
    messages: Any = [{"role": "user", "content": content}]
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=TOKENS, temperature=0, stream=True
    )
    found = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert found == expected("<user><image>x\n<assistant>", 1)[0]


def test_anthropics_messages_take_images(sees: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture(1))}
    content = [text("a"), {"type": "image", "source": source}, text("b"), text("c")]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(f"{sees}/v1/messages", json=body, timeout=60).json()
    words, tokens = expected("<user>a<image>b\n\nc\n<assistant>", 1)
    assert answer["content"][0]["text"] == words
    counted = {name: body[name] for name in ("model", "messages")}
    assert httpx.post(f"{sees}/v1/messages/count_tokens", json=counted).json() == {"input_tokens": tokens}


def test_responses_take_images(sees: str) -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(picture(1))}]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}], "max_output_tokens": TOKENS}
    answer = httpx.post(f"{sees}/v1/responses", json={**body, "temperature": 0}, timeout=60).json()
    assert answer["output"][0]["content"][0]["text"] == expected("<user>a<image>\n<assistant>", 1)[0]


def test_results_of_calls_have_images(sees: str) -> None:
    """They follow the results, in a message of the user: templates have no other place for them."""
    url, function = data_url(picture(1)), {"name": "f", "arguments": "{}"}
    asked = {"model": MODEL, "temperature": 0}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    results = [
        {"role": "tool", "tool_call_id": "1", "content": "it"},
        {"role": "user", "content": [part(url), text("b")]},
    ]
    messages = [{"role": "user", "content": "a"}, called, *results]
    wanted = chat(sees, "", messages=messages).json()["choices"][0]["message"]["content"]

    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture(1))}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}, text("it")]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [result, text("b")]},
    ]
    answer = httpx.post(f"{sees}/v1/messages", json={**asked, "messages": messages, "max_tokens": TOKENS}, timeout=60)
    assert answer.json()["content"][0]["text"] == wanted

    output = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "it"}]
    given = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    answer = httpx.post(f"{sees}/v1/responses", json={**asked, "input": given, "max_output_tokens": TOKENS}, timeout=60)
    messages = [{"role": "user", "content": "a"}, called, results[0], {"role": "user", "content": [part(url)]}]
    wanted = chat(sees, "", messages=messages).json()["choices"][0]["message"]["content"]
    assert answer.json()["output"][0]["content"][0]["text"] == wanted


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("/v1/chat/completions", "image_url.url", {"type": "image_url", "image_url": {}}),
        ("/v1/chat/completions", "image_url", {"type": "image_url"}),
        ("/v1/chat/completions", "image_url.detail", part("x") | {"image_url": {"url": "x", "detail": "low"}}),
        ("/v1/chat/completions", "", {"type": "input_audio"}),
        ("/v1/messages", "source", {"type": "image", "source": {"type": "file", "file_id": "x"}}),
        (
            "/v1/messages",
            "source.media_type",
            {"type": "image", "source": {"type": "base64", "media_type": "image/gif"}},
        ),
        ("/v1/messages", "", {"type": "document"}),
    ],
)
def test_fields_of_images_are_refused_by_name(sees: str, path: str, field: str, given: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [given]}], "max_tokens": 1}
    answer = httpx.post(f"{sees}{path}", json=body)
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"].startswith(f"'messages.0.content.0{'.' * bool(field)}{field}'")


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header promises a size and whose data has none of it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def url_of(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


REFUSED = {
    "a web address": ("https://example.com/a.png", "URLs are not fetched"),
    "an address of this machine": ("http://127.0.0.1:8000/metrics", "URLs are not fetched"),
    "a file": ("file:///etc/passwd", "URLs are not fetched"),
    "another type": ("data:image/svg+xml;base64,AAAA", "must be 'data:image/png;base64"),
    "no base64": ("data:image/png;base64,?!", "not valid base64"),
    "nothing": ("data:image/png;base64,", "damaged"),
    "another format": (url_of(b"GIF89a" + bytes(40)), "damaged, or no image of"),
    "a size without data": (url_of(png_of_size(40, 30)), "damaged"),
    "too many pixels": (url_of(png_of_size(60_000, 60_000)), "damaged"),  # Pillow's own bound
    "more pixels than accepted": (url_of(png_of_size(5_000, 4_000)), "5000 x 4000 pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_acceptable_image_is_refused(sees: str, name: str) -> None:
    url, why = REFUSED[name]
    answer = chat(sees, [part(url)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"].startswith("image 0: ")
    assert why in answer.json()["error"]["message"]
    assert len(answer.content) <= 1024
    assert httpx.get(f"{sees}/health").status_code == 200


class Host(BaseHTTPRequestHandler):
    """A host with the picture of each seed."""

    def do_GET(self) -> None:
        content = base64.b64decode(encoded(picture(int(self.path.strip("/.png")))))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_images_of_listed_hosts_are_fetched_on_every_route(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    image, common = f"http://{host}/1.png", {"model": MODEL, "temperature": 0}
    words = expected("<user>a<image>\n<assistant>", 1)[0]
    with seeing(tmp_path, image_hosts=(host,)) as url:
        answer = chat(url, [text("a"), part(image)]).json()
        assert answer["choices"][0]["message"]["content"] == words
        blocks = [text("a"), {"type": "image", "source": {"type": "url", "url": image}}]
        body = {**common, "messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS}
        assert httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()["content"][0]["text"] == words
        parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": image}]
        body = {**common, "input": [{"role": "user", "content": parts}], "max_output_tokens": TOKENS}
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60).json()
        assert answer["output"][0]["content"][0]["text"] == words
        refused = chat(url, [part("http://metadata.internal/1.png")])
        assert refused.status_code == 400
        assert "image 0: images are not fetched from metadata.internal" in refused.json()["error"]["message"]
    server.shutdown()
    server.server_close()


def test_too_many_images_are_refused(sees: str) -> None:
    answer = chat(sees, [part(data_url(picture(1)))] * 5)
    assert answer.status_code == 400
    assert "5 images; at most 4" in answer.json()["error"]["message"]


def test_images_are_for_users_alone(sees: str) -> None:
    messages = [{"role": "system", "content": [part(data_url(picture(1)))]}]
    answer = chat(sees, "", messages=messages)
    assert answer.status_code == 400
    assert "role 'user' alone" in answer.json()["error"]["message"]


def test_a_placeholder_in_a_text_is_no_image(sees: str) -> None:
    answer = chat(sees, [text("<image> <image>"), part(data_url(picture(1)))])
    assert answer.status_code == 400
    assert "refused the images" in answer.json()["error"]["message"]
    assert chat(sees, "hello").status_code == 200


@pytest.mark.parametrize("length", [235, 300, 1_000_000])
def test_a_prompt_beyond_the_context_is_refused(sees: str, length: int) -> None:
    answer = chat(sees, [text("q" * length), part(data_url(picture(1)))])
    assert answer.status_code == 400
    assert "at most 255 fit" in answer.json()["error"]["message"]


def test_a_photo_is_turned_as_its_camera_says() -> None:
    photo, buffer = picture(1, (60, 50)), io.BytesIO()
    exif = photo.getexif()
    exif[0x0112] = 6  # orientation: a quarter turn
    photo.save(buffer, "png", exif=exif)
    assert decode(buffer.getvalue(), MAX_PIXELS).size == (50, 60)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_a_model_of_texts_refuses_images(url: str, route: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part(data_url(picture(1)))]}]}
    answer = httpx.post(f"{url}{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "images" in answer.json()["error"]["message"]


def test_all_images_together_have_a_bound_of_pixels() -> None:
    whole = base64.b64decode(encoded(picture(1, (60, 50))))
    assert decode(whole, 3000).size == (60, 50)
    with pytest.raises(ImageError, match=f"60 x 50 pixels.* {MAX_PIXELS}"):
        decode(whole, 2999)


@pytest.mark.slow
def test_images_beyond_those_that_were_planned_for_are_refused() -> None:
    _, support = largest_prompt(processor(), 255)
    assert (support.most, support.elements) == (4, {"pixel_values": 4 * 3 * 16 * 16})
    less = ImageSupport(processor(), 4, {"pixel_values": 3 * 16 * 16}, 255)
    less.process("<image>", [data_url(picture(1))], special=False)
    with pytest.raises(ImageError, match="memory is planned for 768"):
        less.process("<image><image>", [data_url(picture(1))] * 2, special=False)


@pytest.mark.slow
def test_as_many_images_are_planned_for_as_the_context_has_room_for() -> None:
    arguments, support = largest_prompt(processor(), 40)
    assert support.most == 2
    assert arguments["input_ids"].shape == (1, 40)
    assert arguments["pixel_values"].shape[0] == 2


@pytest.mark.slow
def test_a_context_too_short_for_an_image_serves_texts(tmp_path: Path) -> None:
    tiny_llava().save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), max_memory={"cpu": "4GiB"}, batch_size=1, context_length=12)
    assert loaded.images is None


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1_300_000, pytest.param(4_000_000, marks=pytest.mark.long)])
def test_the_largest_images_keep_to_the_budget_of_an_accelerator(
    tmp_path: Path, accelerators: None, budget: int
) -> None:
    """As many images as are accepted, in prompts of the whole context, beside texts."""
    tiny_llava().save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    placed = load(str(tmp_path), max_memory={0: budget, "cpu": "1GiB"}, batch_size=1, context_length=256)
    assert placed.images is not None
    made = build_engine(placed.model, placed.tokenizer, placed.plan, EngineOptions(max_sequences=4))
    ids, media = placed.images.process(
        "<image>" * 4 + "q" * (255 - 4 * 16 - 12), [data_url(picture(seed)) for seed in range(4)], special=False
    )
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    sinks = [Collector() for _ in range(4)]
    requests = [Request(f"r{n}", ids, params, sink, media=media if n % 2 else None) for n, sink in enumerate(sinks)]
    gc.collect()
    reset_peak_memory(0)
    made.start()
    for request in requests:
        made.submit(request)
    for sink in sinks:
        sink.wait()
    made.stop()
    assert max_memory_allocated(0) <= budget
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long), **media}
    assert [sinks[n].tokens() for n in (1, 3)] == [generated(tiny_llava(), inputs, 6)] * 2


@pytest.mark.slow
@alike("kind", [kind for kind in KINDS if kind.name.startswith("qwen2") or kind.name == "qwen3_vl"], first=1, ids=repr)
def test_activations_are_planned_where_placeholders_are_counted(
    kind: VisionKind, tmp_path: Path, accelerators: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt may begin with an image; the padding of a dry run is no part of that."""
    processing = kind.processor()
    built(kind, processing.tokenizer).save_pretrained(tmp_path)
    processing.tokenizer.save_pretrained(tmp_path)
    arguments, _ = largest_prompt(processing, 250)
    placed = load(
        str(tmp_path),
        max_memory={0: 8_000_000, "cpu": "1GiB"},
        batch_size=1,
        context_length=256,
        sample_inputs=arguments,
    )
    assert "are not known" not in caplog.text
    (planned,) = (device for key, device in placed.plan.devices.items() if key not in ("cpu", "disk"))
    assert planned.activations > 0
    gc.collect()
    reset_peak_memory(0)
    inputs = {**arguments, "attention_mask": torch.ones(1, 250, dtype=torch.long)}
    generated(placed.model, {name: value.to(at(0)) for name, value in inputs.items()}, TOKENS)
    assert max_memory_allocated(0) <= planned.allocated


@pytest.mark.slow
def test_a_plan_counts_the_images(tmp_path: Path) -> None:
    """What a plan of the same prompts without images has for activations is less."""
    tiny_llava().save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), max_memory={"cpu": "4GiB"}, batch_size=1, context_length=100)
    texts = from_pretrained(str(tmp_path), max_memory={"cpu": "4GiB"}, context_length=100, sample_inputs=TEXT)
    plan = get_plan(texts)
    assert plan is not None
    assert loaded.plan.devices["cpu"].activations > plan.devices["cpu"].activations
    assert (loaded.plan.batch_size, loaded.plan.context_length) == (1, 100)

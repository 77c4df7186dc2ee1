"""The page, looked at and used in a real browser."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bigmodel.dispatch import dispatch_model
from bigmodel.server import Settings, create_app
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.status import view
from bigmodel.server.loading import load
from bigmodel.server.replicas.fleet import Fleet, ReplicaReport, ReportBoard
from bigmodel.server.text.images import MAX_PIXELS, content_of, decode
from tests.examples import alike
from tests.server.live import MODEL, engine_of, serving, tiny_app
from tests.server.models.several import save, served, several_app
from tests.server.scripted import scripted_app
from tests.server.serve_tiny import Gated, SlowOrBroken
from tests.server.tiny import tiny_model, tiny_tokenizer
from tests.server.vision import picture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--renderer-process-limit=1", "--process-per-site", "--disable-gpu"]
"""All pages are drawn by one process, which takes half a second to start, and without one that stands in for a GPU."""


def test_the_page_is_one_file_without_external_resources(url: str) -> None:
    answer = httpx.get(url)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", answer.text)
    assert "http://" not in answer.text
    assert "https://" not in answer.text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


# News are asked for every 250 ms, not every second.
FAST_TIMERS = "const slow = setTimeout; window.setTimeout = (then, after) => slow(then, after / 4);"
# An answer is waited for however long a busy machine takes.
NO_TIME_LIMIT = "AbortSignal.timeout = () => new AbortController().signal;"


@contextlib.contextmanager
def open_page(browser: Any, url: str, *, script: str = FAST_TIMERS, **options: Any) -> Iterator[Any]:
    """A page that fails the test on any script error; ``script`` runs first: by default news are asked for sooner."""
    page = browser.new_page(**options)
    page.add_init_script(script)
    page.on("pageerror", lambda error: pytest.fail(f"script error: {error}"))
    try:
        page.goto(url)
        yield page
    finally:
        # A route still being answered would raise in whichever test uses the browser next.
        page.unroute_all(behavior="ignoreErrors")
        page.close()


def tiny_app_whose_texts_end(at: frozenset[int], model: Any = None) -> Any:
    """The application; a text ends with the first of the tokens ``at``, or when it is as long as it may be."""
    app = tiny_app(model)
    engine_of(app).core.eos_ids = at
    return app


def shows(page: Any, selector: str, pattern: str) -> None:
    """Wait until the text of an element matches."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(re.compile(pattern), timeout=30_000)


@pytest.mark.slow
def test_a_message_is_sent_and_its_tokens_appear(browser: Any) -> None:
    model = tiny_model()
    app = tiny_app_whose_texts_end(at=frozenset(), model=model)
    gate = model.model.embed_tokens = Gated(model.model.embed_tokens)
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        assert page.text_content("#model") == MODEL
        page.fill("#max-tokens", "30")
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        length = 0
        for _ in range(3):
            gate.allowed.release(10)
            longer = "length => (document.querySelector('.message.assistant .text')?.textContent.length ?? 0) > length"
            page.wait_for_function(longer, arg=length)
            length = len(page.text_content(".message.assistant .text"))
        page.wait_for_selector(".message.assistant small")
        assert page.text_content(".message.user") == "the cat"
        assert re.search(r"30 tokens in .* the first after", page.text_content(".message.assistant small"))


@pytest.mark.slow
def test_a_screen_reader_is_told_an_answer_once(browser: Any) -> None:
    """Each token would be read out if the region were live in which the answer grows."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    model = tiny_model()
    app = tiny_app_whose_texts_end(at=frozenset(), model=model)
    gate = model.model.embed_tokens = Gated(model.model.embed_tokens)
    count = "new MutationObserver(all => window.told = (window.told || 0) + all.length)"
    with serving(app) as url, open_page(browser, url, bypass_csp=True) as page:
        page.wait_for_selector("#status.ready")
        page.evaluate(f"{count}.observe(document.getElementById('said'), {{ childList: true }})")
        page.fill("#max-tokens", "20")
        send(page, "the cat")
        gate.allowed.release(10)
        page.wait_for_function("() => document.querySelector('.message.assistant .text')?.textContent.length > 0")
        assert page.get_attribute("#messages", "aria-busy") == "true"
        assert page.get_attribute("#messages", "aria-live") == "off"  # a log is polite if nothing else is said
        assert page.text_content("#said") == ""
        assert not axe.Axe().run(page).response["violations"]
        gate.allowed.release(100)
        said(page, 1)
        assert page.get_attribute("#messages", "aria-busy") == "false"
        answer, number = (page.text_content(f".message.assistant {part}") for part in (".text", "small"))
        assert page.text_content("#said") == f"{answer}. {number}"
        assert page.evaluate("window.told") == 1
        assert not axe.Axe().run(page).response["violations"]


@pytest.mark.slow
@pytest.mark.parametrize(("end", "shown"), [([], "Well, so"), (["</think>", "Yes", "."], "Yes.")])
def test_the_reasoning_is_shown_until_the_answer_begins(browser: Any, end: list[str], shown: str) -> None:
    app = scripted_app(["<think>", "Well", ", so", *end], template="</think>")
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#temperature", "0")
        page.fill("#prompt", "really?")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message.assistant small")
        assert page.text_content(".message.assistant .text") == shown


@pytest.mark.slow
def test_an_answer_without_text_ends(browser: Any) -> None:
    every_token = frozenset(range(len(tiny_tokenizer())))
    with serving(tiny_app_whose_texts_end(at=every_token)) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        shows(page, ".message.assistant small", "^1 tokens in .* none with a text$")


@pytest.mark.slow
def test_a_truncated_answer_is_an_error(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=""))
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        shows(page, ".message.error small", "^the server stopped in the middle")


@pytest.mark.slow
def test_stopping_frees_the_slot(browser: Any) -> None:
    model = tiny_model()
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.05)
    app = tiny_app(model)
    engine_of(app).core.eos_ids = frozenset()  # or the text may end before it is stopped
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#max-tokens", "900")
        page.fill("#prompt", "go on and on")
        page.click("#send")
        shows(page, "#running", "^1 ")
        page.click("#stop")
        page.wait_for_selector(".message.assistant small")
        assert "stopped" in page.text_content(".message.assistant small")
        shows(page, "#running", "^0 ")
        assert engine_of(app).core.counts.generated < 900


def said(page: Any, number: int) -> None:
    """Wait until there are so many whole answers."""
    page.wait_for_function("n => document.querySelectorAll('.message.assistant small').length === n", arg=number)


def send(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


@pytest.mark.slow
def test_conversations_are_kept_by_the_browser(browser: Any, url: str) -> None:
    context = browser.new_context()
    with open_page(context, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#max-tokens", "5")
        send(page, "the cat")
        said(page, 1)
        page.click("#new")
        assert page.locator(".message").count() == 0
        send(page, "a dog")
        said(page, 1)
    with open_page(context, url) as page:
        page.wait_for_selector("#status.ready")
        assert page.locator("#chats option").all_text_contents() == ["New conversation", "a dog", "the cat"]
        assert page.locator(".message").count() == 0
        page.select_option("#chats", label="the cat")
        assert page.locator(".message .text").first.text_content() == "the cat"
        assert re.search(r"\d tokens in", page.text_content(".message.assistant small"))
        page.fill("#max-tokens", "5")
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, "and then?")
        roles = [message["role"] for message in asked.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "user"]
        said(page, 2)
        page.click("#delete")
        assert page.locator("#chats option").all_text_contents() == ["New conversation", "a dog"]
    with open_page(context, url) as page:
        assert page.locator("#chats option").all_text_contents() == ["New conversation", "a dog"]
    context.close()


@pytest.mark.slow
def test_a_browser_that_keeps_nothing_has_a_chat_all_the_same(browser: Any, url: str) -> None:
    context = browser.new_context()
    context.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };")
    with open_page(context, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#max-tokens", "5")
        send(page, "the cat")
        said(page, 1)
    context.close()


@pytest.mark.slow
def test_an_answer_is_made_anew(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        assert page.is_disabled("#again")
        page.fill("#max-tokens", "5")
        send(page, "the cat")
        said(page, 1)
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#again")
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "the cat"}]
        said(page, 1)
        assert page.locator(".message.user").count() == 1


@pytest.mark.slow
def test_settings_are_those_of_the_request(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.click("summary")
        for name, value in {"system": "Be brief.", "top-p": "0.5", "seed": "7", "max-tokens": "5"}.items():
            page.fill(f"#{name}", value)
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, "the cat")
        body = asked.value.post_data_json
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["top_p"], body["seed"], body["max_completion_tokens"]) == (0.5, 7, 5)
        said(page, 1)


def with_images(route: Any) -> None:
    """Answer GET /plan as of a model that takes images."""
    answer = route.fetch()
    route.fulfill(response=answer, json={**answer.json(), "images": True})


@pytest.mark.slow
def test_images_are_sent_small_and_can_be_taken_back(browser: Any, url: str, tmp_path: Path) -> None:
    for name, size in {"wide.png": (3000, 60), "small.jpg": (20, 10)}.items():
        picture(1, size).save(tmp_path / name)
    (tmp_path / "none.png").write_bytes(b"no image")
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        assert page.is_hidden("#picture")
        page.route("**/plan?*", with_images)
        page.wait_for_selector("#picture:visible")
        page.set_input_files("#picture-file", [tmp_path / name for name in ("small.jpg", "wide.png", "none.png")])
        page.wait_for_selector(".message.error")
        assert page.locator("#pictures button").count() == 2
        page.click("#pictures button[aria-label='Remove image 1']")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=""))
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, "what is it?")
        (message,) = asked.value.post_data_json["messages"]
        text, image = message["content"]
        assert text == {"type": "text", "text": "what is it?"}
        shown = decode(content_of(image["image_url"]["url"]), MAX_PIXELS)
        assert shown.size == (1024, 20)
        page.wait_for_selector(".message.user img")
        assert page.is_hidden("#pictures")


@pytest.mark.slow
def test_it_is_used_by_the_keyboard_alone(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        reached: list[str] = []
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        controls = ["chats", "new", "delete", "messages", "prompt", "temperature", "max-tokens", "send", "SUMMARY"]
        assert [each for each in reached if each in controls][: len(controls)] == controls
        page.focus("#max-tokens")
        page.keyboard.press("Control+A")
        page.keyboard.type("5")
        page.focus("#prompt")
        page.keyboard.type("the cat")
        page.keyboard.press("Enter")
        said(page, 1)
        assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.slow
def test_axe_finds_nothing(browser: Any, url: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with open_page(browser, url, color_scheme="light", bypass_csp=True) as page:
        page.wait_for_selector(".device .bar")
        page.fill("#max-tokens", "5")
        send(page, "the cat")
        said(page, 1)
        page.click("summary")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = axe.Axe().run(page)
            assert not found.response["violations"], f"{scheme}: {found.generate_report()}"


@pytest.mark.slow
def test_axe_finds_nothing_beside_an_error_and_the_key_box(browser: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    app = tiny_app(api_keys=("sesame",))
    with serving(app) as url, open_page(browser, url, color_scheme="light", bypass_csp=True) as page:

        def nothing_is_found(shown: str) -> None:
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                found = axe.Axe().run(page)
                assert not found.response["violations"], f"{shown}, {scheme}: {found.generate_report()}"

        page.wait_for_selector("#key-box:visible")
        nothing_is_found("the key box")
        page.fill("#key", "sesame")
        page.click("#key-form button")
        page.wait_for_selector("#status.ready")
        page.fill("#max-tokens", "100000")
        send(page, "x")
        page.wait_for_selector(".message.error")
        nothing_is_found("an error")


@pytest.mark.slow
def test_devices_and_numbers_are_shown(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector(".device .bar .weights")
        assert page.text_content(".device strong") == "cpu"
        assert "measured peak" in page.text_content(".device")
        shows(page, "#rate", r"\d")


@pytest.mark.slow
def test_planned_and_used_memory_are_shown(browser: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    placed = load(str(tmp_path), max_memory={"cpu": "8MiB", "disk": "1MiB"}, context_length=128)
    app = create_app(placed.model, placed.tokenizer, placed.plan, settings=Settings(MODEL))
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector(".device .bar.predicted .weights")
        # Both at once: the bars are drawn anew every second, and to another scale when more is in use.
        planned, used = page.evaluate(
            """() => ['predicted', 'now'].map((kind) =>
                document.querySelector(`.device .bar.${kind} .weights`).getBoundingClientRect().width)"""
        )
        assert planned == pytest.approx(used, abs=1)
        assert "predicted peak" in page.text_content(".device")
        assert "nothing of the model is here" in page.text_content(".device:last-child")


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_streamed_bytes_and_keys_and_values_are_shown_as_they_change(browser: Any) -> None:
    model: Any = dispatch_model(tiny_model(layers=4), {"": 0, "model.layers": "cpu"})
    app = tiny_app_whose_texts_end(at=frozenset(), model=model)
    model.model.embed_tokens = SlowOrBroken(model.model.embed_tokens, 0.02)
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        shows(page, "#streamed div:first-child dt", "^RAM to virtual:0$")
        shows(page, "#streamed > div:first-child .quiet", "^0 B/s$")
        assert page.is_hidden("#nothing-streamed")
        assert page.locator(".device .bar.now .kv").count() == 0
        page.fill("#max-tokens", "900")
        send(page, "go on and on")
        shows(page, "#streamed > div:first-child .quiet", r"^(?!0 B)[\d.]+ .*B/s$")
        page.wait_for_selector(".device .bar.now .kv")
        shows(page, ".device:first-child > .quiet", r"keys and values (?!0 B)[\d.]+ \w+ of 64.0 MiB")
        early = page.text_content("#streamed > div:first-child dd")
        page.wait_for_function("early => $('streamed').querySelector('dd').textContent !== early", arg=early)
        page.click("#stop")
        shows(page, "#running", "^0 ")
        # A look a moment later has what the link carried in all, and that it is at rest.
        carried = model.dispatch_stats()["virtual:0"]
        in_words = [page.evaluate("bytes", carried[f"bytes_from_{tier}"]) for tier in ("ram", "disk")]
        for number, words in enumerate(in_words, start=1):
            shows(page, f"#streamed > div:nth-child({number}) dd", f"^{re.escape(words)}$")
            shows(page, f"#streamed > div:nth-child({number}) .quiet", "^0 B/s$")
        assert carried["bytes_from_ram"] > 0


@pytest.mark.slow
def test_experts_and_the_bubbles_of_stages_are_shown(browser: Any, url: str) -> None:
    moved = {"bytes_from_ram": 1, "bytes_from_disk": 0, "seconds_waited": 0, "hits": 6, "misses": 2, "on_host": 1}
    stage = {"device": "cuda:1", "active_seconds": 8.0, "busy_seconds": 6.0, "idle_share": 0.25}
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        experts, stages = page.evaluate(
            """async ([moved, stage]) => {
                const { engine } = await (await fetch('plan')).json();
                showStreamed([{ device: 'cuda:0', ...moved }, { device: 'cuda:0, experts', ...moved }]);
                showEngine({ ...engine, stages: { devices: [stage] } });
                return ['streamed', 'stages'].map((id) => [...$(id).children].map((box) => box.innerText));
            }""",
            [moved, stage],
        )
    assert experts[-1].split("\n") == ["cuda:0, experts in the cache", "75 %", "1 fetched, 1 computed on the host"]
    assert len(experts) == 3 + 4
    assert [each.split("\n") for each in stages] == [["cuda:1 idle", "25 %", "of 8.0 s with steps"]]


@pytest.mark.slow
def test_one_of_several_models_is_chosen(browser: Any, tmp_path: Path) -> None:
    models = {name: save(tmp_path / name, seed) for seed, name in enumerate("ab")}
    app = several_app(models, {"cpu": "1GiB"})
    with serving(app) as url, open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.wait_for_selector("#models:not([hidden])")
        shows(page, "#models", r"^ab \(unloaded\)$")
        page.select_option("#models", "b")
        shows(page, "#devices", "^It is not loaded")
        page.fill("#max-tokens", "5")
        page.fill("#prompt", "the cat")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message.assistant small")
        shows(page, "#models", "^ab$")
        shows(page, "#running", "^0 / 2$")
        assert page.title().startswith("b ")
        assert 1 <= served(app, "b").running.engine.core.counts.generated <= 5  # a drawn token may end the text
        assert served(app, "a").running.engine.core.counts.generated == 0


@pytest.mark.slow
def test_a_lone_model_is_no_choice(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        assert page.is_hidden("#models")
        assert page.text_content("#model") == MODEL


@pytest.mark.slow
def test_replicas_are_shown_in_sum_and_individually(browser: Any) -> None:
    app, board = tiny_app(), ReportBoard(clock=lambda: 0.0)  # nobody is gone, however long the browser takes
    state = app.state.server
    state.reporter = Fleet(state.reporter, board, "here")
    with serving(app) as url:
        board.put("there", ReplicaReport("", {**view(state.first), "machine": "elsewhere"}))
        with open_page(browser, url) as page:
            shows(page, "#detail", "^2 replicas")
            shows(page, "#devices > h3", "^All replicas together$")
            shows(page, ".replica:last-child", "^Replica thereon elsewhere0 / 8 running")
            assert page.locator(".replica").count() == 2
            assert page.locator(".device").count() == 3
            shows(page, "#running", "^0 / 16$")


@pytest.mark.slow
def test_an_unavailable_status_is_explained(browser: Any) -> None:
    class Unreachable:
        def put(self, replica: str, report: ReplicaReport) -> None: ...

        def reports(self) -> Any:
            raise APIError(503, "the other replicas cannot be asked")

    app = tiny_app()
    app.state.server.reporter = Fleet(app.state.server.reporter, Unreachable(), "here")
    with serving(app) as url, open_page(browser, url) as page:
        shows(page, "#detail", "^the other replicas cannot be asked$")


@pytest.mark.slow
def test_an_error_is_shown_and_the_conversation_goes_on(browser: Any, url: str) -> None:
    with open_page(browser, url) as page:
        page.wait_for_selector("#status.ready")
        page.fill("#max-tokens", "100000")
        page.fill("#prompt", "x")
        page.click("#send")
        page.wait_for_selector(".message.error")
        assert "max_completion_tokens" in page.text_content(".message.error")
        page.fill("#max-tokens", "5")
        page.fill("#prompt", "y")
        page.click("#send")
        page.wait_for_selector(".message.assistant:not(.error) small")


@pytest.mark.slow
def test_the_page_requests_a_key_and_uses_it(browser: Any) -> None:
    with serving(tiny_app(api_keys=("sesame",))) as url, open_page(browser, url) as page:
        page.wait_for_selector("#key-box:visible")
        page.fill("#key", "sesame")
        page.click("#key-form button")
        page.wait_for_selector("#status.ready")
        assert page.is_hidden("#key-box")


@pytest.mark.slow
def test_a_late_answer_does_not_request_the_key_again(browser: Any) -> None:
    held: list[Any] = []

    def hold_first(route: Any) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    app, script = tiny_app(api_keys=("sesame",)), FAST_TIMERS + NO_TIME_LIMIT
    with serving(app) as url, open_page(browser, url, script=script) as page:
        page.wait_for_selector("#key-box:visible")
        page.route("**/plan?*", hold_first)
        while not held:  # the request event of an earlier request may come after `route`
            page.wait_for_timeout(20)
        assert "authorization" not in held[0].request.headers
        page.fill("#key", "sesame")
        page.click("#key-form button")
        page.wait_for_selector("#status.ready")
        page.evaluate(
            """() => {
                window.asked = 0;
                const box = document.getElementById('key-box');
                new MutationObserver(() => { window.asked += !box.hidden; }).observe(box, {attributes: true});
            }"""
        )
        with page.expect_response(lambda answer: answer.status == 401):
            held[0].continue_()
        page.wait_for_event("response", lambda answer: "/plan" in answer.url)  # a later one
        assert page.evaluate("window.asked") == 0


@alike(("scheme", "width"), [("light", 360), ("dark", 1280)], first=1)
@pytest.mark.slow
def test_the_page_fits_the_screen_with_readable_contrast(
    browser: Any, url: str, scheme: str, width: int, tmp_path: Path
) -> None:
    with open_page(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        page.wait_for_selector(".device .bar")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        colours = page.evaluate(
            """() => ['h1', '.quiet', 'dd', '#status', 'button'].map((selector) => {
                const style = getComputedStyle(document.querySelector(selector));
                let box = document.querySelector(selector), ground = 'rgba(0, 0, 0, 0)';
                while (box && ground === 'rgba(0, 0, 0, 0)') {
                    ground = getComputedStyle(box).backgroundColor; box = box.parentElement;
                }
                return [selector, style.color, ground];
            })"""
        )
        for selector, front, ground in colours:
            assert contrast(front, ground) >= 4.5, f"{selector}: {front} on {ground}"
        picture = tmp_path / f"{scheme}-{width}.png"
        page.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 10_000


def contrast(front: str, ground: str) -> float:
    """The contrast ratio of two CSS colours, as accessibility guidelines define it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(front), luminance(ground)), reverse=True)
    return (high + 0.05) / (low + 0.05)

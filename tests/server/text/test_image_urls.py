"""Images that clients name by URL come from listed hosts alone, within bounds of bytes, seconds and redirects."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bigmodel.errors import ServeError
from bigmodel.server.text import image_urls
from bigmodel.server.text.image_urls import ImageHosts
from bigmodel.server.text.images import ImageError

IMAGE = b"an image" * 100
asked: list[tuple[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    """Answers by the path."""

    def do_GET(self) -> None:
        asked.append((self.path, self.headers["Host"]))
        name = self.path.strip("/").partition("?")[0]
        if name == "missing":
            self.send_error(404)
        elif name.startswith("to"):
            self.send_response(302)
            self.send_header("Location", {"to": "/image", "to-loop": "/to-loop", "to-other": OTHER}[name])
            self.end_headers()
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:  # a byte at a time, which no timeout of a socket ends
                    self.wfile.write(b"x")
                    time.sleep(0.01)
        elif name == "torn":
            self.send_response(200)
            self.send_header("Content-Length", str(2 * len(IMAGE)))
            self.end_headers()
            self.wfile.write(IMAGE)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(IMAGE)

    def log_message(self, *_: object) -> None: ...


OTHER = "http://metadata.internal/secret"


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """A host with images, with its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_images_of_listed_hosts_are_fetched_and_others_stay(host: str) -> None:
    hosts = ImageHosts([host])
    assert hosts.fetch([f"http://{host}/a.png?size=1", "data:image/png;base64,AA", f"http://{host}/to"]) == [
        IMAGE,
        "data:image/png;base64,AA",
        IMAGE,
    ]
    assert ("/a.png?size=1", host) in asked


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a",  # another port
        "http://localhost/a",
        "https://evil.example/a",
        "https://images.example.com.evil.example/a",
        "https://example.com/a",
        "https://deep.images.example.org:8443/a",
    ],
)
def test_other_hosts_are_not_asked(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connects"))
    with pytest.raises(ImageError, match="image 0: images are not fetched from"):
        ImageHosts([host, "*.example.com", "images.example.org"]).fetch([url])


@pytest.mark.parametrize(
    "url",
    [
        "http://user@images.example.com/a",
        "http://images.example.com@evil.example/a",
        "http://images.example.com\\@evil.example/a",
        "http://images.example.com:x/a",
        "http://images.example.com:99999/a",
        "http://images.example.com/a b",
        "http://images.example.com/a\r\nHost: other",
        "http:///a",
        "http://[::1/a",
        "http://\uff49mages.example.com/a",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connects"))
    with pytest.raises(ImageError, match="image 0: "):
        ImageHosts(["images.example.com", "evil.example"]).fetch([url])


def test_a_name_with_a_star_stands_for_all_below_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: object, **__: object) -> socket.socket:
        connected.append(address)
        raise OSError("it is not there")

    monkeypatch.setattr(socket, "create_connection", connect)
    for url in ("https://a.example.com/x", "http://A.B.example.com/x", "https://c.example.com:443/x"):
        with pytest.raises(ImageError, match=r"image 0: from [abc.]+\.example\.com cannot be fetched"):
            ImageHosts(["*.example.com"]).fetch([url])
    assert connected == [("a.example.com", 443), ("a.b.example.com", 80), ("c.example.com", 443)]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "was answered with status 404"),
        ("to-other", "images are not fetched from metadata.internal"),
        ("to-loop", "has more than 3 redirects"),
        ("torn", "cannot be fetched"),
    ],
)
def test_what_a_host_does_wrong_is_one_error(host: str, path: str, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        ImageHosts([host]).fetch([f"http://{host}/{path}"])


def test_bytes_of_all_images_are_bounded_together(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "MAX_BYTES", 2 * len(IMAGE))
    hosts, url = ImageHosts([host]), f"http://{host}/a.png"
    assert hosts.fetch([url, url]) == [IMAGE, IMAGE]
    with pytest.raises(ImageError, match="image 2: is too large"):
        hosts.fetch([url, url, url])


@pytest.mark.slow
def test_a_host_that_sends_a_byte_at_a_time_is_left(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "SECONDS", 0.2)
    with pytest.raises(ImageError, match=r"from 127\.0\.0\.1 took too long"):
        ImageHosts([host]).fetch([f"http://{host}/slow"])


def silent() -> socket.socket:
    """A host that accepts connections and answers nothing."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_answers_nothing_is_left(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "SECONDS", 0.2)
    with silent() as listener:
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ImageError, match="took too long"):
            ImageHosts([host]).fetch([f"{scheme}://{host}/a"])


def test_no_thread_is_left(host: str) -> None:
    before = threading.active_count()
    ImageHosts([host]).fetch([f"http://{host}/a.png"])
    until(lambda: threading.active_count() <= before)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "name", ["", "*", "http://images.example.com", "images.example.com/cats", "a b", "ex*mple.com"]
)
def test_a_name_that_is_none_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(ServeError, match="is no name of a host"):
        ImageHosts([name])

from __future__ import annotations

import socket
import threading

from bigmodel.nodes.ring import accepted


def test_only_who_shows_the_secret_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(2)]
        strangers[0].sendall(b"another secret")
        strangers[1].close()
        friend = socket.create_connection(address)
        found: list[socket.socket] = []
        waits = threading.Thread(target=lambda: found.append(accepted(listener, b"a secret of it")))
        waits.start()
        friend.sendall(b"a secret")
        friend.sendall(b" of it")
        waits.join(30)
        friend.sendall(b"hello")
        assert found[0].recv(5) == b"hello"
        assert strangers[0].recv(1) == b""
        for each in (*strangers, friend, *found):
            each.close()

"""Several copies of the server behind one address, on one machine or a cluster, through Ray Serve.

Each replica is the same application with its own model and engine; Ray Serve's proxy spreads requests over them and
restarts one whose engine has failed. They share the cluster's processors and GPUs alike, and whichever is asked for
/metrics or /plan answers for all of them. On several machines the model must be found under the same name on each.
``pip install bigmodel[ray]``.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fastapi import FastAPI

from bigmodel.errors import ServeError
from bigmodel.server.errors import APIError
from bigmodel.server.fleet import Fleet
from bigmodel.server.replica_board import Board, Word
from bigmodel.server.replica_resources import Machine, resources
from bigmodel.server.run import bind, url
from bigmodel.server.state import ServerState
from bigmodel.server.view import view

logger = logging.getLogger(__name__)

BuildApp = Callable[[], FastAPI]


def run_replicas(
    build: BuildApp,
    *,
    replicas: int,
    host: str,
    port: int,
    max_requests: int,
    drain_timeout: float,
    cluster: str | None = None,
) -> int:
    """Serve ``replicas`` copies of the application that ``build`` makes, until a signal; the exit code.

    ``build`` is called in each replica's process and must be picklable. ``max_requests`` bounds what one replica is
    handed at once. ``cluster`` is the address of a running Ray cluster ("auto" finds it); None starts one on this
    machine. Raises ServeError when Ray is not installed or the replicas do not come up.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ServeError("--replicas needs Ray: pip install 'bigmodel[ray]'") from error
    ray.init(address=cluster, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
    stopped = _on_signal()  # after Ray has set its own handlers, before anybody can know that this server is there
    try:
        serve.start(http_options={"host": host, "port": port})
        share = resources(machines_of_cluster(), replicas)
        board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
        application = deployment(build, replicas, max_requests, drain_timeout, share, board)
        serve.run(application, name="bigmodel", route_prefix="/")
        logger.info("%d replicas are serving on %s", replicas, url(host, port))
        stopped.wait()
        serve.shutdown()
    except (RuntimeError, TimeoutError) as error:
        raise ServeError(f"the replicas did not come up: {error}") from error
    finally:
        ray.shutdown()
    return 0


def deployment(
    build: BuildApp, replicas: int, max_requests: int, drain_timeout: float, share: Mapping[str, float], board: Any
) -> Any:
    """The Ray Serve application: ``build`` as an ASGI ingress, so many times, each with ``share`` of the cluster."""
    from ray import serve

    def build_here() -> FastAPI:  # Ray takes a function only, and calls it in the replica's process
        app = build()
        state: ServerState = app.state.server
        state.fleet = Fleet(lambda: Word(state.metrics.render().decode(), view(state)), RemoteBoard(board))
        state.fleet.start()
        return app

    @serve.ingress(build_here)
    class Replica:
        """One copy, built in its own process. Ray asks it for its health and replaces it when it raises."""

        app: FastAPI  # given by Ray

        async def check_health(self) -> None:
            state: ServerState = self.app.state.server
            if state.failure is not None:
                raise ServeError("the engine of this replica has failed") from state.failure

    return serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=drain_timeout,
        request_router_config={"request_router_class": "bigmodel.server.replica_router.FewestRequests"},
        ray_actor_options=dict(share),
    )(Replica).bind()


class RemoteBoard:
    """The board, from a replica's process. ``actor`` is the Ray actor that it is."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def put(self, replica: str, word: Word) -> None:
        """Not waited for: a board that is being restarted misses a word and hears the next one."""
        self._actor.put.remote(replica, word)

    def words(self) -> tuple[dict[str, Word], dict[str, Word]]:
        """All that was said, by this process too; 503 while the board cannot be reached."""
        import ray
        from ray.exceptions import RayError

        try:
            words: tuple[dict[str, Word], dict[str, Word]] = ray.get(self._actor.words.remote(), timeout=5)
        except RayError as error:
            raise APIError(503, "the other replicas cannot be asked", code="replicas_unavailable") from error
        return words


def machines_of_cluster() -> list[Machine]:
    """The machines that the running Ray cluster has."""
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in found]


def free_port(host: str) -> int:
    """A port of ``host`` that nobody listens on: Ray's proxies, one a machine, must all be told the same."""
    listener = bind(host, 0)
    try:
        port: int = listener.getsockname()[1]
        return port
    finally:
        listener.close()


def _on_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopped

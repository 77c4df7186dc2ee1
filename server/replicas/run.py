"""Several replicas of the server behind one address, on one machine or a cluster, through Ray Serve.

Each replica is the same application with its own model and engine. Ray Serve's proxy spreads requests over them and
restarts a replica whose engine has failed. They share the cluster's processors and GPUs equally. On several machines
the model must have the same name or path on each.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fastapi import FastAPI

from bigmodel.errors import ServeError
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.run import bind, url
from bigmodel.server.http.state import ServerState
from bigmodel.server.replicas.fleet import Fleet, ReplicaReport, ReportBoard

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
    """Serve ``replicas`` copies of the application that ``build`` makes, until a signal; returns the exit code.

    ``build`` is called in each replica's process and must be picklable. ``max_requests`` bounds the requests that one
    replica has at once. ``cluster`` is the address of a running Ray cluster ("auto" finds it); None starts one on this
    machine. Raises ServeError when Ray is not installed or the replicas do not come up.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ServeError("--replicas needs Ray: pip install 'bigmodel[ray]'") from error
    ray.init(address=cluster, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
    stopped = _on_signal()  # after Ray has set its own handlers, before the server is reachable
    try:
        serve.start(http_options={"host": host, "port": port})
        share = resources(machines_of_cluster(), replicas)
        board = ray.remote(num_cpus=0, max_restarts=-1)(ReportBoard).remote()
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

    def build_here() -> FastAPI:  # Ray calls it in the replica's process
        app = build()
        state: ServerState = app.state.server
        assert state.reporter is not None
        state.reporter = fleet = Fleet(state.reporter, RemoteReportBoard(board))
        fleet.start()
        return app

    @serve.ingress(build_here)
    class Replica:
        """One copy, built in its own process. Ray calls `check_health`, and replaces it when that raises."""

        app: FastAPI  # set by Ray

        async def check_health(self) -> None:
            state: ServerState = self.app.state.server
            if state.failure is not None:
                raise ServeError("the engine of this replica has failed") from state.failure

    return serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=drain_timeout,
        request_router_config={"request_router_class": "bigmodel.server.replicas.router.FewestRequests"},
        ray_actor_options=dict(share),
    )(Replica).bind()


class RemoteReportBoard:
    """The board as a replica's process sees it; ``actor`` is its Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def put(self, replica: str, report: ReplicaReport) -> None:
        """Send a report without waiting: a board that is being restarted misses it and receives the next one."""
        self._actor.put.remote(replica, report)

    def reports(self) -> tuple[dict[str, ReplicaReport], dict[str, ReplicaReport]]:
        """See :meth:`.fleet.ReportBoard.reports`; raises a 503 while the board cannot be reached."""
        import ray
        from ray.exceptions import RayError

        try:
            reports: tuple[dict[str, ReplicaReport], dict[str, ReplicaReport]] = ray.get(
                self._actor.reports.remote(), timeout=5
            )
        except RayError as error:
            raise APIError(503, "the other replicas cannot be asked", code="replicas_unavailable") from error
        return reports


def machines_of_cluster() -> list[ClusterMachine]:
    """The machines of the running Ray cluster."""
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [ClusterMachine(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in found]


def free_port(host: str) -> int:
    """A free port of ``host``. Ray's proxies, one per machine, must all use the same one."""
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


@dataclass(frozen=True)
class ClusterMachine:
    """Processors and GPUs of one machine of the cluster."""

    cpus: int
    gpus: int = 0


def resources(machines: Seq[ClusterMachine], replicas: int) -> dict[str, float]:
    """Resources of each of ``replicas``: as many GPUs, then processors, as all of them can have.

    Replicas share GPUs where there are fewer GPUs than replicas. Ray gives a replica one thread per processor.
    """
    gpus = sum(machine.gpus for machine in machines)
    if not gpus:
        return {"num_cpus": _cpus(machines, 0, replicas)}
    share = max((n for n in range(1, gpus + 1) if _places(machines, 1, n) >= replicas), default=0)
    if share:
        return {"num_cpus": _cpus(machines, share, replicas), "num_gpus": share}
    # As many replicas on each GPU as all of them need: a GPU cannot be split over machines.
    return {"num_cpus": 1, "num_gpus": 1 / -(-replicas // gpus)}


def _cpus(machines: Seq[ClusterMachine], gpus: int, replicas: int) -> int:
    most = max((machine.cpus for machine in machines), default=1)
    return max((n for n in range(1, most + 1) if _places(machines, n, gpus) >= replicas), default=1)


def _places(machines: Seq[ClusterMachine], cpus: int, gpus: int) -> int:
    """Return the number of replicas of this size that fit the machines."""
    return sum(
        min(machine.cpus // cpus, machine.gpus // gpus if gpus else machine.cpus // cpus) for machine in machines
    )

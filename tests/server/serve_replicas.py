"""A process that serves two replicas of the tiny model through Ray Serve, on the cluster whose address it is given."""

from __future__ import annotations

import sys

from fastapi import FastAPI

from bigmodel.server.replicas.run import free_port, run_replicas


def build() -> FastAPI:
    import torch

    from tests.server.live import tiny_app

    torch.set_num_threads(1)
    app = tiny_app()

    @app.get("/machine")
    def machine() -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    return app


def main(cluster: str) -> int:
    port = free_port("127.0.0.1")
    print(port, flush=True)
    return run_replicas(
        build, replicas=2, host="127.0.0.1", port=port, max_requests=64, drain_timeout=5, cluster=cluster
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

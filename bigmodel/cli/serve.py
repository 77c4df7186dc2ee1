"""`bigmodel serve`: an OpenAI-compatible HTTP server over a model of any size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server import Loaded, Loading, Settings
    from server.app import Loader


def serve(
    model: Annotated[str, typer.Argument(help="A folder with a checkpoint, or a Hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model (default: its name).")
    ] = None,
    max_memory: Annotated[str | None, typer.Option(help="Budget per device, as in 0=10GiB,cpu=8GiB.")] = None,
    device_map: Annotated[str, typer.Option(help="Strategy, or one device for everything.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that opens the API; may be given several times.", envvar="BIGMODEL_API_KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one key a line.", exists=True, dir_okay=False)
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences generated at once.")] = 16,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; then 429.")] = 128,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")] = 512,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt plus output, in tokens (default: the model's).")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for keys and values on each device, as in 4GiB.")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep keys and values of prompts for reuse.")] = True,
    batch_invariant: Annotated[
        bool,
        typer.Option(help="The same tokens alone and in a batch, at the price of some speed of a lone stream."),
    ] = True,
    draft_model: Annotated[
        str | None, typer.Option(help="A small model of the same tokenizer that guesses tokens ahead.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens it guesses in one step.")] = 4,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds a request may take, waiting included.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")
    ] = 30.0,
    max_body: Annotated[str, typer.Option(help="Longest request body.")] = "8MiB",
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the server, spread over by Ray Serve.")] = 1,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster for the replicas; auto finds a running one.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error or critical.")] = "info",
) -> None:
    """Serve MODEL over HTTP: OpenAI's completions and chat, batched, with a page to look at on /."""
    from bigmodel.devices import parse_size
    from server import EngineOptions, Settings
    from server.loading import display_name, parse_max_memory

    keys = [*(api_key or []), *(_keys(api_key_file) if api_key_file else [])]
    settings = Settings(
        served_model_name or display_name(model),
        api_keys=tuple(keys),
        max_body_bytes=parse_size(max_body),
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        engine=EngineOptions(
            max_sequences=max_sequences,
            max_batch_tokens=max(max_batch_tokens, max_sequences + 128),
            max_queue=max_queue,
            kv_bytes=None if kv_memory is None else parse_size(kv_memory),
            max_length=max_model_len,
            prefix_cache=prefix_cache,
            row_multiple="auto" if batch_invariant else 1,
            draft_tokens=draft_tokens,
        ),
    )
    options = {
        "device_map": device_map,
        "max_memory": parse_max_memory(max_memory),
        "dtype": dtype,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "batch_size": max_sequences,
        "context_length": max_model_len,
    }
    load_all = partial(_load, model, draft_model, options)
    if replicas > 1 or ray_address is not None:
        raise typer.Exit(_replicate(load_all, settings, host, port, replicas, ray_address))
    raise typer.Exit(_serve(load_all, settings, host, port, log_level))


def _keys(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def _load(model: str, draft_model: str | None, options: Mapping[str, Any], progress: Loading) -> Loaded:
    from server.loading import load, with_draft

    loaded = load(model, **options, progress=progress)
    return loaded if draft_model is None else with_draft(loaded, load(draft_model, progress=progress))


def _serve(loader: Loader, settings: Settings, host: str, port: int, log_level: str) -> int:
    import logging

    from server import create_app
    from server.run import bind, run

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
    listener = bind(host, port)
    app = create_app(loader=loader, settings=settings)
    address, chosen = listener.getsockname()[:2]
    typer.echo(f"serving {settings.model_name} on http://{address}:{chosen}", err=True)
    code = run(app, listener, log_level=log_level)
    if app.state.server.failure is not None:
        typer.echo(f"error: {app.state.server.failure}", err=True)
    return code


def _replicate(loader: Loader, settings: Settings, host: str, port: int, replicas: int, cluster: str | None) -> int:
    from server import create_app
    from server.replicas import run_replicas

    typer.echo(f"serving {replicas} replicas of {settings.model_name} on http://{host}:{port}", err=True)
    return run_replicas(
        partial(create_app, loader=loader, settings=settings),
        replicas=replicas,
        host=host,
        port=port,
        max_requests=settings.engine.max_sequences + settings.engine.max_queue,
        drain_timeout=settings.drain_timeout,
        cluster=cluster,
    )

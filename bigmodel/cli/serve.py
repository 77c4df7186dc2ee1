"""`bigmodel serve`: an HTTP server with OpenAI's and Anthropic's interfaces over a model of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from . import model_options as shared
from .interrupts import EndingAtOnce
from .serve_nodes import ServedNodes, launched, plan_for, refuse_beside_nodes, serve_stage, start

if TYPE_CHECKING:
    from bigmodel.devices import DeviceLike
    from bigmodel.server import Loaded, Loading, Settings
    from bigmodel.server.http.keys import ApiKey
    from bigmodel.server.loading import Loader, LoadOptions, PlannedModel

Host: TypeAlias = Annotated[str, typer.Option(help="Address to listen on.")]
Port: TypeAlias = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
_MODELS = typer.Argument(
    metavar="MODEL...",
    help="A folder with a checkpoint, or a Hub id; several share the budgets. NAME=MODEL sets its name in the API.",
)
Models: TypeAlias = Annotated[list[str], _MODELS]
Name: TypeAlias = Annotated[str | None, typer.Option(help="Model name in the API (default: the model's own).")]
_KEYS = typer.Option(help="API key that clients must send; may be repeated.", envvar="BIGMODEL_API_KEY")
Keys: TypeAlias = Annotated[list[str] | None, _KEYS]
_KEY_FILE = typer.Option(
    help="File of API keys, one per line, as `bigmodel add-key` writes it.", exists=True, dir_okay=False
)
KeyFile: TypeAlias = Annotated[Path | None, _KEY_FILE]
_SEQUENCES = typer.Option(min=1, help="Most sequences generated at once; memory is planned for them (default: 16).")
Sequences: TypeAlias = Annotated[int | None, _SEQUENCES]
Queue: TypeAlias = Annotated[int, typer.Option(min=0, help="Most waiting sequences; further requests get status 429.")]
BatchTokens: TypeAlias = Annotated[int, typer.Option(min=1, help="Most tokens computed in one step.")]
_LENGTH = typer.Option(min=1, help="Longest prompt plus output, in tokens (default: the model's).")
Length: TypeAlias = Annotated[int | None, _LENGTH]
KVMemory: TypeAlias = Annotated[str | None, typer.Option(help="KV cache memory on a device, such as 4GiB.")]
_PREFIX = typer.Option(
    "--prefix-cache",
    help="Folder that keeps the KV cache of prompts on disk, too, for a later start of the same model.",
    file_okay=False,
)
PrefixFolder: TypeAlias = Annotated[Path | None, _PREFIX]
_PREFIX_SIZE = typer.Option("--prefix-cache-size", help="Most bytes of that folder.")
PrefixSize: TypeAlias = Annotated[str, _PREFIX_SIZE]
_NO_PREFIX = typer.Option("--no-prefix-cache", help="Compute shared prompt prefixes each time.")
NoPrefix: TypeAlias = Annotated[bool, _NO_PREFIX]
_INVARIANT = typer.Option(help="Same tokens alone and in a batch; slows single streams slightly.")
Invariant: TypeAlias = Annotated[bool, _INVARIANT]
_TIMEOUT = typer.Option(min=0.001, help="Longest time of a request in seconds, queueing included.")
RequestTimeout: TypeAlias = Annotated[float | None, _TIMEOUT]
_DRAIN = typer.Option(min=0, help="Seconds that running requests may take to finish after SIGTERM.")
DrainTimeout: TypeAlias = Annotated[float, _DRAIN]
_BODY = typer.Option(help="Largest request body, such as 8MiB (default: as the model's context needs).")
Body: TypeAlias = Annotated[str | None, _BODY]
_TOOLS = typer.Option(
    help="Format of the model's tool calls: deepseek, function-gemma, gemma, gemma4, glm, harmony, hermes, llama3, "
    "mistral, qwen-xml, none, or auto: what its chat template shows."
)
ToolParser: TypeAlias = Annotated[str, _TOOLS]
_REASONING = typer.Option(help="Format of the model's reasoning: think, gemma4, mistral, harmony, none, or auto.")
ReasoningParser: TypeAlias = Annotated[str, _REASONING]
_TELEMETRY = typer.Option(
    "--telemetry", help="Make spans of OpenTelemetry; its environment variables say where they go."
)
TelemetryFlag: TypeAlias = Annotated[bool, _TELEMETRY]
_KEEP = typer.Option(min=0.001, help="Unload a model after so many seconds without requests (default: never).")
KeepAlive: TypeAlias = Annotated[float | None, _KEEP]
_LOAD_TIMEOUT = typer.Option(min=0.001, help="Longest time in seconds that a request waits for its model to be loaded.")
LoadTimeout: TypeAlias = Annotated[float, _LOAD_TIMEOUT]
_LORA = typer.Option(
    "--lora",
    help="NAME=FOLDER of a LoRA adapter, which requests ask for as model NAME; MODEL:NAME=FOLDER for one of several "
    "models; may be repeated.",
)
Adapters: TypeAlias = Annotated[list[str] | None, _LORA]
_BATCHES = typer.Option(
    help="Folder of the files and batches of clients, which a later start goes on with (default: a temporary one).",
    file_okay=False,
)
BatchFolder: TypeAlias = Annotated[Path | None, _BATCHES]
BatchSize: TypeAlias = Annotated[str, typer.Option(help="Most bytes of these files.")]
_IMAGE_HOSTS = typer.Option(
    "--image-hosts",
    help="Host that images of chats are fetched from, as images.example.com or *.example.com; may be repeated.",
)
ImageHosts: TypeAlias = Annotated[list[str] | None, _IMAGE_HOSTS]
_ORIGINS = typer.Option(
    "--allowed-origins",
    help="Origin of pages that may call the server from a browser, as https://chat.example.com, or *; may be repeated.",
)
AllowedOrigins: TypeAlias = Annotated[list[str] | None, _ORIGINS]
_NODES = typer.Option(
    help="JSON file of several hosts, or the plan over them that `bigmodel plan --nodes --json` prints: each process "
    "computes one stage.",
    exists=True,
    dir_okay=False,
)
NodesFile: TypeAlias = Annotated[Path | None, _NODES]
_RESTARTS = typer.Option(min=0, help="Times that the processes of --nodes are started again after one fails.")
Restarts: TypeAlias = Annotated[int, _RESTARTS]
_SLOW = typer.Option("--slow-links", help="Messages of --nodes take as long as planned, to try links on one host.")
SlowLinks: TypeAlias = Annotated[bool, _SLOW]
Replicas: TypeAlias = Annotated[int, typer.Option(min=1, help="Copies of the server, balanced by Ray Serve.")]
_CLUSTER = typer.Option(help="Address of the Ray cluster for replicas; auto: a running one.")
Cluster: TypeAlias = Annotated[str | None, _CLUSTER]


class LogLevel(str, Enum):
    """Levels of logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


Log: TypeAlias = Annotated[LogLevel, typer.Option(help="How much to log.")]


def serve(
    models: Models,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Name = None,
    max_memory: shared.Budgets = None,
    device_map: shared.DeviceMap = "auto",
    dtype: shared.DType = "auto",
    offload: shared.Offload = "stream",
    offload_dtype: shared.OffloadDType = None,
    host_kernels: shared.HostKernels = "exact",
    offload_folder: shared.OffloadFolder = None,
    revision: shared.Revision = None,
    trust_remote_code: shared.RemoteCode = False,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    max_sequences: Sequences = None,
    max_queue: Queue = 128,
    max_batch_tokens: BatchTokens = 512,
    max_model_len: Length = None,
    kv_memory: KVMemory = None,
    prefix_cache: PrefixFolder = None,
    prefix_cache_size: PrefixSize = "20GiB",
    no_prefix_cache: NoPrefix = False,
    batch_invariant: Invariant = True,
    draft_model: shared.DraftModel = None,
    draft_tokens: shared.DraftTokens = None,
    speculate: shared.Speculate = None,
    force_speculation: shared.ForceSpeculation = False,
    steps_in_flight: shared.InFlight = None,
    lora: Adapters = None,
    prompt_lookup: shared.PromptLookup = 0,
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = 30.0,
    max_body: Body = None,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    telemetry: TelemetryFlag = False,
    keep_alive: KeepAlive = None,
    load_timeout: LoadTimeout = 120.0,
    batch_folder: BatchFolder = None,
    batch_folder_size: BatchSize = "10GiB",
    image_hosts: ImageHosts = None,
    allowed_origins: AllowedOrigins = None,
    nodes: NodesFile = None,
    max_restarts: Restarts = 10,
    slow_links: SlowLinks = False,
    replicas: Replicas = 1,
    ray_address: Cluster = None,
    log_level: Log = LogLevel.INFO,
) -> None:
    """Serve MODEL over HTTP, batched: OpenAI's and Anthropic's interfaces, embeddings, ranking, and a web page at /.

    Several are loaded when a request asks for them, and unloaded when another needs their memory.
    """
    with EndingAtOnce():  # until the server takes over the signals, there is nothing to undo
        from bigmodel.devices import parse_size
        from bigmodel.server import EngineOptions, Settings
        from bigmodel.server.engine.budget import DEFAULT_SEQUENCES, planned_chunk
        from bigmodel.server.loading import LoadOptions, parse_max_memory
        from bigmodel.server.models.named import named_adapters, named_models

        drafted = shared.tokens_drafted(draft_tokens, draft_model, speculate)
        keys = (*(api_key or ()), *(_keys(api_key_file) if api_key_file else ()))
        kv_bytes = None if kv_memory is None else parse_size(kv_memory)
        rows: int | str = "auto" if batch_invariant else 1
        engine = EngineOptions(
            max_sequences,
            max_batch_tokens,
            max_queue,
            kv_bytes,
            max_model_len,
            not no_prefix_cache,
            rows,
            drafted or EngineOptions.draft_tokens,
            prompt_lookup=prompt_lookup,
            prefix_folder=prefix_cache,
            prefix_folder_bytes=parse_size(prefix_cache_size),
            force_speculation=force_speculation,
            steps_in_flight=steps_in_flight,
        )
        served = named_models(models)
        first = next(iter(served))
        lone = served_model_name or first
        adapters = named_adapters(lora or (), served if len(served) > 1 else {lone: served[first]})
        several = len(served) > 1
        replicated = replicas > 1 or ray_address is not None
        if replicated and batch_folder is not None:
            raise typer.BadParameter("--batch-folder is for one server; replicas keep no files and run no batches")
        if several:
            _refuse_for_several(served_model_name, draft_model or speculate, replicated, trust_remote_code)
        settings = Settings(
            lone,
            keys,
            None if max_body is None else parse_size(max_body),
            request_timeout,
            drain_timeout,
            engine,
            tool_parser,
            reasoning_parser,
            telemetry,
            keep_alive,
            load_timeout,
            () if several else tuple(adapters.get(lone, ())),
            not replicated,
            batch_folder,
            parse_size(batch_folder_size),
            tuple(name for given in image_hosts or () for name in given.split(",")),
            tuple(origin for given in allowed_origins or () for origin in given.split(",")),
        )
        budgets = parse_max_memory(max_memory)
        options = LoadOptions(
            device_map=device_map,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            offload=offload,
            offload_dtype=offload_dtype,
            host_kernels=host_kernels,
            offload_folder=offload_folder,
            batch_size=max_sequences or DEFAULT_SEQUENCES,
            context_length=max_model_len,
            draft_tokens=prompt_lookup or drafted,
            padded=False,  # steps are packed
            prefill_chunk_size=planned_chunk(engine, max_sequences or DEFAULT_SEQUENCES),
        )
        if nodes is not None:
            refuse_beside_nodes(
                {
                    "several models": several,
                    "--max-memory": max_memory,
                    "--device-map": device_map != "auto",
                    "--offload": offload != "stream",
                    "--offload-dtype": offload_dtype,
                    "--host-kernels": host_kernels != "exact",
                    "--trust-remote-code": trust_remote_code,
                    "--prefix-cache": prefix_cache,
                    "--draft-model": draft_model,
                    "--speculate": speculate,
                    "--lora": lora,
                    "--keep-alive": keep_alive,
                    "--replicas": replicas > 1,
                    "--ray-address": ray_address,
                }
            )
            raise typer.Exit(
                _serve_nodes(
                    served[first], nodes, options, settings, (host, port), log_level.value, slow_links, max_restarts
                )
            )
        if several:
            raise typer.Exit(
                _serve(_several(served, options, budgets, adapters), settings, host, port, log_level.value)
            )
        options["max_memory"] = budgets
        load_all = partial(_load, served[first], draft_model, speculate is not None, adapters.get(lone, {}), options)
        if not replicated:
            raise typer.Exit(_serve(load_all, settings, host, port, log_level.value))
    raise typer.Exit(_replicate(load_all, settings, host, port, replicas, ray_address))


def _keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys in a file. A file without keys is an error: it must not leave the server open."""
    from bigmodel.errors import ServeError
    from bigmodel.server.http.keys import parse_keys

    try:
        return parse_keys(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ServeError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _load(
    model: str,
    draft_model: str | None,
    head: bool,
    adapters: Mapping[str, str],
    options: LoadOptions,
    progress: Loading,
) -> Loaded:
    from bigmodel.server.loading import load_with_draft, load_with_head

    if head:
        return load_with_head(model, progress=progress, adapters=adapters, **options)
    return load_with_draft(model, draft_model, progress=progress, adapters=adapters, **options)


def _refuse_for_several(name: str | None, draft: str | None, replicated: bool, trusted: bool) -> None:
    """Refuse options that mean one model."""
    if name is not None:
        raise typer.BadParameter("--served-model-name names one model; write NAME=MODEL for each of several")
    if draft is not None:
        raise typer.BadParameter("--draft-model and --speculate propose tokens for one model; serve that one alone")
    if replicated:
        raise typer.BadParameter("--replicas and --ray-address copy a server of one model; serve that one alone")
    if trusted:
        raise typer.BadParameter("--trust-remote-code: several models are planned from their configs, without code")


@dataclass(frozen=True)
class _Several:
    """Several models by name, and the budgets that they share."""

    models: Mapping[str, PlannedModel]
    budgets: Mapping[int | str, int]


def _several(
    models: Mapping[str, str],
    options: LoadOptions,
    budgets: Mapping[DeviceLike, int | str] | None,
    adapters: Mapping[str, Mapping[str, str]],
) -> _Several:
    from bigmodel.server.models.budgets import server_budgets
    from bigmodel.server.models.named import planned_models

    return _Several(planned_models(models, options, adapters), server_budgets(budgets))


def _serve(models: Loader | _Several, settings: Settings, host: str, port: int, log_level: str) -> int:
    import logging

    from bigmodel.server import create_app
    from bigmodel.server.http.run import bind, run, url

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
    listener = bind(host, port)
    if isinstance(models, _Several):
        app = create_app(models=models.models, budgets=models.budgets, settings=settings)
    else:
        app = create_app(loader=models, settings=settings)
    address, chosen = listener.getsockname()[:2]
    names = ", ".join(app.state.server.models)
    typer.echo(f"serving {names} on {url(address, chosen)}", err=True)
    code = run(app, listener, log_level=log_level)
    if app.state.server.failure is not None:
        typer.echo(f"error: {app.state.server.failure}", err=True)
    return code


def _serve_nodes(
    model: str,
    nodes: Path,
    options: LoadOptions,
    settings: Settings,
    address: tuple[str, int],
    log_level: str,
    slow_links: bool,
    restarts: int,
) -> int:
    from bigmodel.server.http.run import url
    from bigmodel.server.loading import LoadOptions
    from bigmodel.server.replicas.run import free_port

    plan = plan_for(model, nodes, options)
    loading = LoadOptions(revision=options["revision"], offload_folder=options["offload_folder"])
    host, port = address[0], address[1] or free_port(address[0])
    served = ServedNodes(model, plan.to_json(), loading, settings, host, port, log_level, slow_links)
    if int(os.environ.get("RANK", "0")) == 0:
        over = f"{len(plan.stages)} nodes"
        typer.echo(f"serving {settings.model_name} over {over} on {url(host, port)}", err=True)
    return serve_stage(served) if launched() else start(served, len(plan.stages), restarts)


def _replicate(loader: Loader, settings: Settings, host: str, port: int, replicas: int, cluster: str | None) -> int:
    from bigmodel.server import create_app
    from bigmodel.server.engine.budget import DEFAULT_SEQUENCES
    from bigmodel.server.http.run import url
    from bigmodel.server.replicas.run import free_port, run_replicas

    port = port or free_port(host)
    typer.echo(f"serving {replicas} replicas of {settings.model_name} on {url(host, port)}", err=True)
    return run_replicas(
        partial(create_app, loader=loader, settings=settings),
        replicas=replicas,
        host=host,
        port=port,
        max_requests=(settings.engine.max_sequences or DEFAULT_SEQUENCES) + settings.engine.max_queue,
        drain_timeout=settings.drain_timeout,
        cluster=cluster,
    )

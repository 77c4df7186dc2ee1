"""Load a model with its tokenizer and plan, and report the progress of loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from bigmodel.devices import DISK, accelerators, format_size, memory_allocated
from bigmodel.errors import BigModelError, ServeError, SizeError
from bigmodel.profile.trace.workload import DEFAULT_CONTEXT
from bigmodel.server.adapters.files import Adapter, adapters_bytes, read_adapter
from bigmodel.server.text.images import ImageSupport, largest_prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bigmodel.plan import Plan
    from bigmodel.profile import Profile
    from bigmodel.server.engine.compute.choose_runner import RunnerChoice
    from bigmodel.sources.mtp import MtpSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve; ``draft_model`` proposes tokens that it verifies.

    ``images`` is there for a model whose prompts may have images. ``checkpoint`` is a digest of the files it was loaded
    from. ``adapters`` are those that requests may name. ``runner`` is what an engine chose for it when it was loaded
    before. ``limits`` are those that other processes set, which compute a part of it.
    """

    model: Any
    tokenizer: Any
    plan: Any = None
    draft_model: Any = None
    images: ImageSupport | None = None
    checkpoint: str | None = None
    adapters: Seq[Adapter] = ()
    runner: RunnerChoice | None = None
    limits: SharedLimits | None = None


@dataclass(frozen=True)
class SharedLimits:
    """Limits of an engine whose model several processes compute.

    Attributes:
        row_multiple: Padding of packed rows with which no process's products depend on the batch.
        kv_tokens: Positions of keys and values that each has memory for.
    """

    row_multiple: int
    kv_tokens: int


class LoadingCancelledError(ServeError):
    """The server was stopped while its model was loading."""


@dataclass
class Loading:
    """Progress of loading. ``fraction`` of the stage, from 0 to 1; None when unknown.

    ``before``: bytes in use on each device before the model was loaded, where measured. Once ``cancelled`` is set, the
    next progress report raises :class:`LoadingCancelledError`. ``again``: whether it has been loaded before.
    """

    stage: str = "starting"
    fraction: float | None = None
    before: dict[str, int] = field(default_factory=dict)
    cancelled: bool = False
    again: bool = False

    def begin(self, stage: str) -> None:
        """Start a stage of unknown length."""
        self._raise_if_cancelled()
        self.fraction = None
        self.stage = stage

    def report(self, done: int, total: int) -> None:
        """Set the fraction from bytes done and in total."""
        self._raise_if_cancelled()
        self.fraction = done / total if total else 1.0

    def measure(self) -> None:
        """Record the bytes in use now, before the model is loaded."""
        self.before = {device: memory_allocated(device) for device in ("cpu", *accelerators())}

    def _raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise LoadingCancelledError("loading was cancelled")


Loader = Callable[[Loading], Loaded]
"""Loads a model and reports its progress."""


def parse_max_memory(text: str | None) -> dict[int | str | torch.device, int | str] | None:
    """``"0=10GiB,cpu=8GiB"`` as a mapping; None stays None. Raises SizeError for anything else."""
    if text is None:
        return None
    budgets: dict[int | str | torch.device, int | str] = {}
    for part in text.split(","):
        device, equals, size = (text.strip() for text in part.partition("="))
        if not (device and equals and size):
            raise SizeError(f"--max-memory: '{part}' is not DEVICE=SIZE, as in 0=10GiB,cpu=8GiB")
        key = int(device) if device.isdecimal() else device
        if key in budgets:
            raise SizeError(f"--max-memory names device {device} twice; give one budget")
        budgets[key] = size
    return budgets


class LoadOptions(TypedDict, total=False):
    """Arguments of ``bigmodel.from_pretrained`` that the command line offers; missing ones have their defaults."""

    device_map: str | Plan
    max_memory: Mapping[int | str | torch.device, int | str] | None
    dtype: str
    revision: str | None
    trust_remote_code: bool
    offload: str
    offload_dtype: str | None
    host_kernels: str
    offload_folder: str | None
    batch_size: int
    context_length: int | None
    padded: bool
    prefill_chunk_size: int | str | None
    draft_tokens: int
    draft: Plan | None
    sample_inputs: Mapping[str, torch.Tensor]
    layers: tuple[int, int] | None


def load(
    model: str,
    *,
    progress: Loading | None = None,
    adapters: Mapping[str, str] | None = None,
    **options: Unpack[LoadOptions],
) -> Loaded:
    """Load ``model`` (a folder or a Hub id), placed by plan, with its tokenizer, and ``adapters``: folders by name.

    Memory for keys and values is planned for ``batch_size`` sequences of ``context_length`` tokens. What adapters take
    is kept free on every device. Raises ServeError when there is no tokenizer, or an adapter that is not served; where
    ``progress`` is that of a model that is loaded again, the model does without such an adapter.
    """
    from bigmodel.checkpoint.progress import watching
    from bigmodel.dispatch import from_pretrained, get_plan
    from bigmodel.server.engine.prefix_identity import checkpoint_digest
    from bigmodel.sources.resolve import open_source

    revision, trusted = options.get("revision"), options.get("trust_remote_code", False)
    progress = progress or Loading()
    progress.begin("looking for the model")
    source = open_source(model, revision, trust_remote_code=trusted)  # raises before anything is loaded
    source.config_dict()  # a folder that is no model's says so: without this, by what its tokenizer lacks
    read = readable_adapters(adapters or {}) if progress.again else all_adapters(adapters or {})
    if read and isinstance(options.get("device_map", "auto"), str):  # a plan was made without what they take
        options["max_memory"] = without_adapters(options.get("max_memory"), adapters_bytes(read))
    progress.begin("loading the tokenizer")
    tokenizer = load_tokenizer(model, revision, trusted)
    images = load_images(model, tokenizer, options)
    progress.measure()
    progress.begin("loading the weights")
    with watching(progress.report):
        placed = from_pretrained(model, per_pass=False, **options)  # the engine holds keys and values itself
    checkpoint = checkpoint_digest(source)
    if progress.again:
        read = _fitting(placed, read)
    return Loaded(placed, tokenizer, get_plan(placed), images=images, checkpoint=checkpoint, adapters=read)


def all_adapters(folders: Mapping[str, str]) -> list[Adapter]:
    """Read adapters from their folders by name. Raises ServeError for one that is not served, CheckpointError for a
    damaged file."""
    return [read_adapter(name, folder) for name, folder in folders.items()]


def readable_adapters(folders: Mapping[str, str]) -> list[Adapter]:
    """Read those adapters that are there and can be served, from their folders by name; the log names the others."""
    found = []
    for name, folder in folders.items():
        try:
            found.append(read_adapter(name, folder))
        except (BigModelError, OSError) as error:
            _left_out(error)
    return found


def _fitting(model: torch.nn.Module, adapters: Seq[Adapter]) -> list[Adapter]:
    """Those of the adapters that are the model's; the log names the others."""
    from bigmodel.server.engine.build import check_adapters

    found = []
    for adapter in adapters:
        try:
            check_adapters(model, [adapter])
        except ServeError as error:
            _left_out(error)
        else:
            found.append(adapter)
    return found


def _left_out(why: BaseException | str) -> None:
    logger.error("requests for an adapter are refused until its model is loaded again: %s", why)


def without_adapters(
    budgets: Mapping[int | str | torch.device, int | str] | None, taken: int
) -> dict[int | str | torch.device, int | str]:
    """Return budgets without the bytes that adapters take, of each device but the disk.

    Where a model's modules run, and with them what adapts them, is not known before it is planned.
    """
    from bigmodel.plan.result.budgets import read_budgets, with_headroom

    known = read_budgets(budgets)
    left = with_headroom(known) if budgets is None else known
    return {key: size if key == DISK else max(size - taken, 0) for key, size in left.items()}


Files = frozenset[tuple[str, int, int, int]]
"""Names of files with their numbers (inodes), sizes and times."""


def _files_of(model: str) -> Files:
    """The files of a model's folder, or its one file; none of a Hub id, whose files do not change."""
    path = Path(model).expanduser()
    found = []
    for file in path.iterdir() if path.is_dir() else [path]:
        try:
            status = file.stat()
        except OSError:  # it went meanwhile
            continue
        found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)


class PlannedModel:
    """A model that is planned before it is loaded, with what is left of budgets then.

    Args:
        model: A folder or a Hub id.
        options: Those of :func:`load`; ``device_map`` is a strategy, and ``max_memory`` is not among them. A model
            whose own context is shorter than ``context_length`` keeps its own.
        adapters: Folders of its adapters by name. They are read here, to be checked and counted, and again each time
            that the model is loaded: a model that is not loaded has none in memory. It is loaded without those that
            cannot be served any more.

    Attributes:
        model: The folder or Hub id.
        adapters: Folders of its adapters by name.
        adapters_bytes: Most bytes that they take of each device beside the plan.

    Raises:
        ServeError: An adapter is not served, or is another model's.
        CheckpointError: A file of one is damaged.
    """

    def __init__(self, model: str, options: LoadOptions, adapters: Mapping[str, str] | None = None) -> None:
        self.model = model
        self.adapters = dict(adapters or {})
        self.adapters_bytes = 0
        self._bytes_of: dict[str, int] = {}
        self._options = options
        self._profiles: dict[str, Profile] = {}
        self._files: Files | None = None
        self.changed()
        if self.adapters:
            self._count_adapters()

    def _count_adapters(self) -> None:
        from bigmodel.profile.source import meta_model
        from bigmodel.server.engine.build import check_adapters
        from bigmodel.sources.resolve import open_source

        read = all_adapters(self.adapters)
        check_adapters(meta_model(open_source(self.model, self._options.get("revision"))), read)
        self.adapters_bytes = adapters_bytes(read)
        self._bytes_of = {adapter.name: adapters_bytes([adapter]) for adapter in read}

    def _adapters_of(self, model: torch.nn.Module) -> list[Adapter]:
        """The adapters as they are now, but for those that are not served any more, or take more than was planned."""
        found: list[Adapter] = []
        for adapter in _fitting(model, readable_adapters(self.adapters)):
            taken, planned = adapters_bytes([adapter]), self._bytes_of[adapter.name]
            if taken > planned or adapters_bytes([*found, adapter]) > self.adapters_bytes:
                _left_out(
                    f"adapter '{adapter.name}' takes {format_size(taken)} of a device and took {format_size(planned)} "
                    "when the server started; start it anew to plan with it"
                )
            else:
                found.append(adapter)
        return found

    @cached_property
    def _workload(self) -> LoadOptions:
        """The options, for no longer a context than the model's, with inputs of images for a model that takes them."""
        options: LoadOptions = {**self._options}
        wanted, own = options.get("context_length"), own_context(self.model, options)
        options["context_length"] = wanted if wanted is None or own is None else min(wanted, own)
        trusted = options.get("trust_remote_code", False)
        load_images(self.model, load_tokenizer(self.model, options.get("revision"), trusted), options)
        return options

    def changed(self) -> bool:
        """Whether files of the model's folder are others than when this was asked before: then what was read of them
        is forgotten, and plans of before are no longer the model's."""
        before, self._files = self._files, _files_of(self.model)
        if before is None or before == self._files:
            return False
        self._profiles.clear()
        vars(self).pop("_workload", None)
        return True

    def plan(self, budgets: Mapping[int | str, int]) -> Plan:
        """The plan within ``budgets``, in bytes by device key, and without what adapters take; no weight is read.

        Raises BudgetError for a model that does not fit them.
        """
        from bigmodel.plan import make_plan
        from bigmodel.plan.result.budgets import device_type_of

        options = self._workload
        offload = options.get("offload", "stream")
        return make_plan(
            self._profile(device_type_of(budgets)),
            {key: size if key == DISK else max(size - self.adapters_bytes, 0) for key, size in budgets.items()},
            str(options.get("device_map", "auto")),
            options.get("batch_size", 1),
            options.get("context_length"),
            offload_dtype=options.get("offload_dtype"),
            host_kernels=options.get("host_kernels"),
            objective=None if offload == "stream" else "latency",  # that depends on measured speeds
            offload=offload,
            per_pass=False,
            draft_tokens=options.get("draft_tokens", 0),
        )

    def _profile(self, device_type: str) -> Profile:
        """The profile that all plans of the model are made from: it takes most of a plan's time."""
        from bigmodel.profile.source import profile_source
        from bigmodel.quantized.host_kernels import EXACT

        if device_type not in self._profiles:
            options = self._workload
            self._profiles[device_type] = profile_source(
                self.model,
                options.get("dtype", "auto"),
                options.get("revision"),
                no_split_module_classes=None,
                device_type=device_type,
                batch_size=options.get("batch_size", 1),
                context_length=options.get("context_length"),
                new_tokens=None,
                sample_inputs=options.get("sample_inputs"),
                host_kernels=options.get("host_kernels") or EXACT,
                padded=options.get("padded", True),
                prefill_chunk_size=options.get("prefill_chunk_size"),
            )
        return self._profiles[device_type]

    def load(self, plan: Plan, progress: Loading) -> Loaded:
        """Load it as planned, with those of its adapters that are still served: the log names the others."""
        options: LoadOptions = {**self._workload, "device_map": plan}
        options.pop("offload", None)  # the plan says what is streamed
        loaded = load(self.model, progress=progress, **options)
        return replace(loaded, adapters=self._adapters_of(loaded.model)) if self.adapters else loaded


def load_images(model: str, tokenizer: Any, options: LoadOptions) -> ImageSupport | None:
    """Return what turns images into inputs of a model, and let ``options`` plan memory for the largest ones.

    None for a model of texts alone, and for one whose processor cannot be loaded or whose images do not fit the
    context; a warning says why then.
    """
    from transformers import AutoProcessor

    config = _config(model, options)
    if config is None or not hasattr(config, "vision_config"):
        return None
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
    try:
        processor = AutoProcessor.from_pretrained(model, **_where(options))
        arguments, images = largest_prompt(
            processor, min(options.get("context_length") or DEFAULT_CONTEXT, longest) - 1
        )
    except (OSError, ValueError, ImportError, AttributeError, ServeError) as error:
        lines = str(error).split("\n")  # transformers' own begin with an empty one, and say how to install on others
        logger.warning("images are refused: %s", next(filter(None, map(str.strip, lines)), repr(error)))
        return None
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = processor.chat_template
    options["sample_inputs"] = arguments
    return images


def own_context(model: str, options: LoadOptions) -> int | None:
    """Most positions of a model; None where its config names none."""
    config = _config(model, options)
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)


def _config(model: str, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **_where(options))
    except (OSError, ValueError):  # GGUF files have none
        return None


def _where(options: LoadOptions) -> dict[str, Any]:
    return {"revision": options.get("revision"), "trust_remote_code": options.get("trust_remote_code", False)}


def load_tokenizer(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder, a repository, or a GGUF file. Raises ServeError when there is none."""
    try:
        return _tokenizer(model, revision, trust_remote_code)
    except (OSError, ValueError) as error:
        raise ServeError(f"no tokenizer can be loaded from '{model}': {error}") from error


def _tokenizer(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    from bigmodel.sources.gguf.model import find_gguf
    from bigmodel.sources.gguf.source import gguf_tokenizer

    path = Path(model).expanduser()
    gguf = find_gguf(path) if path.exists() else None
    if gguf is not None and not (gguf.parent / "tokenizer_config.json").exists():
        return gguf_tokenizer(gguf)
    folder = model if gguf is None else str(gguf.parent)
    return AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)


def load_with_draft(
    model: str,
    draft_model: str | None,
    *,
    progress: Loading | None = None,
    adapters: Mapping[str, str] | None = None,
    **options: Unpack[LoadOptions],
) -> Loaded:
    """As :func:`load`, with a draft model if given; that one is placed automatically, in its stored dtype.

    Where the options have ``draft_tokens``, the plan knows the seconds in which the draft model proposes one.
    """
    loaded = load(model, progress=progress, adapters=adapters, **options)
    if draft_model is None:
        return loaded
    proposed = options.get("draft_tokens", 0)
    return with_draft(loaded, load(draft_model, progress=progress, draft_tokens=min(proposed, 1)))


def load_with_head(
    model: str,
    *,
    progress: Loading | None = None,
    adapters: Mapping[str, str] | None = None,
    **options: Unpack[LoadOptions],
) -> Loaded:
    """As :func:`load`, with the checkpoint's MTP head in the place of a draft model, planned within the same budgets.

    Raises CheckpointMismatchError if the checkpoint has none.
    """
    from bigmodel.dispatch.mtp import load_head

    source, head = plan_with_head(model, options)
    options["draft"] = head
    loaded = load(model, progress=progress, adapters=adapters, **options)
    return replace(loaded, draft_model=load_head(source, head, options.get("dtype", "auto")))


def plan_with_head(model: str, options: LoadOptions) -> tuple[MtpSource, Plan]:
    """A checkpoint's MTP head, and its plan within the budgets of ``options``.

    Raises CheckpointMismatchError if the checkpoint has none, and BudgetError if it does not fit.
    """
    from bigmodel.dispatch.mtp import plan_head
    from bigmodel.plan.result.budgets import read_budgets, with_headroom
    from bigmodel.sources.mtp import MtpSource
    from bigmodel.sources.resolve import open_source

    source = MtpSource(open_source(model, options.get("revision")))
    given = options.get("max_memory")
    budgets = read_budgets(given)
    return source, plan_head(
        source,
        with_headroom(budgets) if given is None else budgets,
        options.get("dtype", "auto"),
        batch_size=options.get("batch_size", 1),
        context_length=options.get("context_length"),
    )


def with_draft(loaded: Loaded, draft: Loaded) -> Loaded:
    """``loaded`` with ``draft`` as its draft model. Raises ServeError unless their tokenizers are equal."""
    if loaded.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
        raise ServeError("the draft model's tokenizer is not the model's: its tokens would mean another text")
    plan, passes = loaded.plan, getattr(draft.plan, "speculation", None)
    if passes is not None and plan is not None and plan.speculation is not None:
        plan = replace(plan, speculation=replace(plan.speculation, proposing=passes.pass_seconds(1)))
    return replace(loaded, draft_model=draft.model, plan=plan)


def display_name(model: str) -> str:
    """Default name of a model for clients: the Hub id, or the last part of a path."""
    path = Path(model)
    return path.resolve().name if path.exists() else model

"""Options shared by several commands: the model, how it is loaded, and where its parts may be placed."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import typer


class Speculation(str, Enum):
    """What proposes tokens beside a draft model."""

    MTP = "mtp"


_OFFLOAD = typer.Option(
    help="Weights that do not fit the accelerator: stream them to it, compute on the CPU, or auto: the faster of both."
)
_OFFLOAD_DTYPE = typer.Option(help="int8 or int4: quantise weights streamed to the accelerator; results are not exact.")
_HOST_KERNELS = typer.Option(
    help="exact: the CPU restores quantised weights; packed: it computes with int4 and int8 as they are, faster; "
    "results are not exact."
)
_OFFLOAD_FOLDER = typer.Option(
    help="Folder for weights on disk that the checkpoint lacks in the needed form, such as quantised ones."
)
_DRAFT = typer.Option(help="Draft model for speculative decoding; must share the tokenizer.")
_DRAFT_TOKENS = typer.Option(
    min=1,
    help="Tokens drafted per step, at most; fewer where the plan predicts that to be faster (default: 4, with mtp 1).",
)
_SPECULATE = typer.Option(
    help="mtp: the checkpoint's own head for multi-token prediction proposes tokens, as that of DeepSeek V3 or GLM 4.5."
)
_FORCE = typer.Option("--force-speculation", help="Propose tokens even where the plan predicts that this is slower.")
_PROMPT_LOOKUP = typer.Option(
    min=0, help="Tokens proposed per step by what followed the last ones earlier in the text, without a model; 0: none."
)
_IN_FLIGHT = typer.Option(min=1, help="Steps computed at once over several accelerators; by default as planned.")

Model: TypeAlias = Annotated[str, typer.Argument(help="A folder with a checkpoint, or a Hub id.")]
Revision: TypeAlias = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
RemoteCode: TypeAlias = Annotated[bool, typer.Option(help="Run code that comes with the model.")]
DType: TypeAlias = Annotated[str, typer.Option(help="Dtype of the loaded weights; auto: as stored.")]
Budgets: TypeAlias = Annotated[str | None, typer.Option(help="Budget per device, as in 0=10GiB,cpu=8GiB.")]
DeviceMap: TypeAlias = Annotated[str, typer.Option(help="Strategy, or one device for everything.")]
Offload: TypeAlias = Annotated[str, _OFFLOAD]
OffloadDType: TypeAlias = Annotated[str | None, _OFFLOAD_DTYPE]
HostKernels: TypeAlias = Annotated[str, _HOST_KERNELS]
OffloadFolder: TypeAlias = Annotated[str | None, _OFFLOAD_FOLDER]
DraftModel: TypeAlias = Annotated[str | None, _DRAFT]
DraftTokens: TypeAlias = Annotated[int | None, _DRAFT_TOKENS]
Speculate: TypeAlias = Annotated[Speculation | None, _SPECULATE]
ForceSpeculation: TypeAlias = Annotated[bool, _FORCE]
PromptLookup: TypeAlias = Annotated[int, _PROMPT_LOOKUP]
InFlight: TypeAlias = Annotated[int | None, _IN_FLIGHT]
BatchSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Sequences per batch.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def tokens_drafted(given: int | None, draft_model: str | None, speculate: Speculation | None) -> int:
    """Return the most tokens that are drafted in a step; 0: nothing drafts any. Refuses two that do."""
    if speculate is None:
        return 0 if draft_model is None else given or 4
    if draft_model is not None:
        raise typer.BadParameter("--speculate and --draft-model both propose tokens; give one of them")
    return given or 1

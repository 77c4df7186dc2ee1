"""Computing one step: tokens in, logits out. What every runner offers, and what runners share.

Two runners with one face: :class:`.packed.PackedRunner` puts the new tokens of every sequence into
one forward, so that one pass over the weights serves the whole batch; :class:`.plain.PlainRunner`
gives each sequence a forward of its own, for models whose attention cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from bigmodel.server.engine.host_linear import HostLinear
from bigmodel.server.engine.scheduler import Grant


class Runner(Protocol):
    """``run`` computes the granted tokens and returns, per grant, the logits asked for.

    That is [1, vocabulary] of the last token where the grant samples, [tokens, vocabulary] of all its tokens
    where the request wants the log-probabilities of its prompt, and None elsewhere.
    """

    name: str
    row_multiple: int
    host_linear: HostLinear

    def run(self, grants: Seq[Grant]) -> list[torch.Tensor | None]: ...

    def bytes_per_token(self) -> dict[str, int]: ...


def wants_all(grant: Grant) -> bool:
    """Whether the logits of all tokens of the grant are needed, not the last one's only."""
    return grant.sequence.params.prompt_logprobs and not grant.sequence.output


def input_device(model: torch.nn.Module) -> torch.device:
    """Where the model takes its tokens: the main device of a dispatched model, else where its weights are."""
    if not hasattr(model, "hf_device_map"):
        device: torch.device = model.device  # type: ignore[assignment]
        return device
    from bigmodel.dispatch.attach.dispatched import dispatched

    found = dispatched(model)
    assert found is not None
    return found.main_device


def readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits where tokens can be chosen: left on CUDA, brought to the host from any other accelerator."""
    return logits if logits.device.type in ("cpu", "cuda") else logits.cpu()

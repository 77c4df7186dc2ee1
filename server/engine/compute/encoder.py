"""The runner of models that generate nothing: encoders, models without an output layer, and classifiers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch

from bigmodel.errors import ServeError
from bigmodel.server.adapters.rows import Adapters
from bigmodel.server.engine.compute.host_linear import HostLinear
from bigmodel.server.engine.compute.runner import input_device, readable
from bigmodel.server.engine.scheduling.request import Sequence
from bigmodel.server.engine.scheduling.scheduler import ScheduledTokens

WASTE = 1.5
"""Most tokens of a padded batch, in units of the texts' own."""


def generates(model: torch.nn.Module) -> bool:
    """Whether texts can be generated with a model: it is a decoder with an output layer over its vocabulary."""
    config: Any = model.config
    can: Any = getattr(model, "can_generate", None)
    return bool(can is None or can()) and not getattr(config, "is_encoder_decoder", False)


class EncoderRunner:
    """Computes whole texts, each in the step that reaches its end; those of similar lengths in one padded forward.

    The states of a text equal those of its own forward up to rounding, which may depend on the others of its batch.
    """

    name = "encoder"
    row_multiple = 1
    host_linear: HostLinear = "torch"
    adapters: Adapters | None = None

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.device = input_device(model)
        self.labels = int(model.config.num_labels) if scores(model) else 0  # type: ignore[union-attr, arg-type]
        parameters = inspect.signature(model.forward).parameters
        pad = getattr(model.config, "pad_token_id", None)
        self._pad = int(pad or 0)
        # Classifiers over decoders find the end of a text by the padding's token.
        self._batches = "attention_mask" in parameters and not (self.labels and pad is None)
        self._takes_types = "token_type_ids" in parameters
        self._extra = {"use_cache": False} if "use_cache" in parameters else {}

    def run(self, batch: Seq[ScheduledTokens]) -> list[torch.Tensor | None]:
        """See :meth:`.runner.Runner.run`: states of all tokens of a text, or its scores as one row."""
        found: dict[int, torch.Tensor] = {}
        ready = [scheduled.sequence for scheduled in batch if scheduled.samples]
        for group in self._groups(ready):
            found |= {sequence.order: rows for sequence, rows in zip(group, self.compute(group), strict=True)}
        return [found.get(scheduled.sequence.order) for scheduled in batch]

    def _groups(self, sequences: Seq[Sequence]) -> Iterator[list[Sequence]]:
        """Sequences that are computed together: little of a batch is padding."""
        group: list[Sequence] = []
        for sequence in sorted(sequences, key=len):
            own = sum(map(len, group)) + len(sequence)
            padded = (len(group) + 1) * len(sequence)
            if group and (not self._batches or padded > WASTE * own):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def compute(self, group: Seq[Sequence]) -> list[torch.Tensor]:
        """Rows of each sequence, from one forward."""
        longest = max(map(len, group))
        ids = [[*sequence.request.prompt, *[self._pad] * (longest - len(sequence))] for sequence in group]
        arguments: dict[str, Any] = {"input_ids": torch.tensor(ids, device=self.device), **self._extra}
        if self._batches:
            mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in group]
            arguments["attention_mask"] = torch.tensor(mask, device=self.device)
        if self._takes_types and any(_types(sequence) for sequence in group):
            types = [[*_types(sequence), *[0] * (longest - len(_types(sequence)))] for sequence in group]
            arguments["token_type_ids"] = torch.tensor(types, device=self.device)
        with torch.inference_mode():
            output = self.model(**arguments)
        if self.labels:
            return list(readable(output.logits)[:, None])
        states = getattr(output, "last_hidden_state", None)
        if states is None:
            raise ServeError(f"{type(self.model).__name__} gives neither states nor scores")
        return [readable(rows[: len(sequence)]) for sequence, rows in zip(group, states, strict=True)]

    def probe(self) -> None:
        """See :meth:`.runner.Runner.probe`. Texts are computed one by one: each that fails is an error of its own."""

    def bytes_per_token(self) -> dict[str, int]:
        """One byte for each position: there are no keys and values, but the pool counts positions."""
        return {str(self.device): 1}


def scores(model: torch.nn.Module) -> bool:
    """Whether a model gives scores of a whole text, not states of its tokens."""
    return type(model).__name__.endswith("ForSequenceClassification")


def _types(sequence: Sequence) -> Seq[int]:
    return sequence.params.pooling.token_types or ()

"""The plan over nodes: the stage of each with its plan, what crosses the links, and the predicted seconds; its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import PlanError
from ...profile.machine.machine import LinkSpeed
from ..result.plan import Plan

FORMAT = 2
"""Format of the JSON, raised whenever a field is added or removed."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one node.

    Attributes:
        node: name of the node.
        start: its first layer.
        stop: the layer behind its last one.
        plan: the plan of these layers on this node, with the embedding on the first and norm and head on the last.
    """

    node: str
    start: int
    stop: int
    plan: Plan


@dataclass(frozen=True)
class Crossing:
    """What one link carries: hidden states to the next stage, or logits from the last to the first.

    Attributes:
        source: name of the sending node.
        target: name of the receiving one.
        step_bytes: bytes for one step of generation.
        prefill_bytes: bytes for the whole prompt.
        rate: bytes per second of the link.
        latency: seconds of the link for each message.
        leaves: link from the accelerator of the sending node to its host; None: the host computes them.
        enters: link from the host of the receiving node to its accelerator, likewise.
    """

    source: str
    target: str
    step_bytes: int
    prefill_bytes: int
    rate: float
    latency: float
    leaves: LinkSpeed | None = None
    enters: LinkSpeed | None = None

    def __post_init__(self) -> None:
        self._link()  # which has a rate

    def _link(self) -> LinkSpeed:
        return LinkSpeed(self.rate, self.latency)

    @property
    def step(self) -> float:
        """Seconds for one step."""
        return self._seconds(self.step_bytes)

    @property
    def prefill(self) -> float:
        """Seconds for the prompt."""
        return self._seconds(self.prefill_bytes)

    def _seconds(self, nbytes: int) -> float:
        return sum(link.seconds(nbytes) for link in (self.leaves, self._link(), self.enters) if link is not None)


@dataclass(frozen=True)
class NodesPlan:
    """A model over several nodes, which compute one after another.

    Attributes:
        model: class of the model.
        stages: in the order they run, one for each node.
        crossings: transfers between stages, the last one of logits back to the first node; none for one node.
    """

    model: str
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...] = ()

    @property
    def step(self) -> float:
        """Predicted seconds of one step of generation: of all stages and transfers, one after another. While other
        nodes compute, the link of each goes on with what was queued on it."""
        crossings = sum(crossing.step for crossing in self.crossings)
        stages = [(_token(stage), _token_after_pause(stage)) for stage in self.stages]
        whole = sum(after for _, after in stages) + crossings
        return sum(max(after, token - (whole - after)) for token, after in stages) + crossings

    @property
    def prefill(self) -> float | None:
        """Predicted seconds for the whole prompt; None if nothing is generated."""
        found = [stage.plan.prediction.prefill for stage in self.stages if stage.plan.prediction is not None]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) + sum(each.prefill for each in self.crossings) if len(known) == len(self.stages) else None

    @property
    def slowest(self) -> float:
        """Predicted seconds between two steps if each stage computes another batch: those of the slowest stage or
        transfer."""
        return max([*map(_token, self.stages), *(crossing.step for crossing in self.crossings)])

    def __str__(self) -> str:
        from .tables import plain_text

        return plain_text(self)

    def to_table(self) -> object:
        """Return the plan as a renderable for `rich.console.Console.print`."""
        from .tables import table

        return table(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the plan as JSON text that `from_json` reads back."""
        stages = [
            {**_without_plan(stage), "plan": json.loads(stage.plan.to_json(indent=None))} for stage in self.stages
        ]
        predicted = {"step": self.step, "prefill": self.prefill, "slowest": self.slowest}
        content = {"format": FORMAT, "model": self.model, "predicted": predicted, "stages": stages}
        return json.dumps({**content, "crossings": [asdict(crossing) for crossing in self.crossings]}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> NodesPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan over nodes.
        """
        from pydantic import TypeAdapter

        try:
            content: dict[str, Any] = json.loads(text)
            if content["format"] != FORMAT:
                raise PlanError(
                    f"this is a plan over nodes of format {content['format']}, and this version reads format {FORMAT}: "
                    "make a new plan"
                )
            stages = [{**stage, "plan": Plan.from_json(json.dumps(stage["plan"]))} for stage in content["stages"]]
            if not stages:
                raise ValueError("it has no stages")
            crossings = TypeAdapter(tuple[Crossing, ...]).validate_python(content["crossings"])
            return cls(str(content["model"]), _stages(stages), crossings)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise PlanError(f"this is not a plan over nodes: {error}") from None


def _stages(entries: Iterable[dict[str, Any]]) -> tuple[Stage, ...]:
    return tuple(Stage(str(each["node"]), int(each["start"]), int(each["stop"]), each["plan"]) for each in entries)


def _without_plan(stage: Stage) -> dict[str, object]:
    return {"node": stage.node, "start": stage.start, "stop": stage.stop}


def _token_after_pause(stage: Stage) -> float:
    found = stage.plan.prediction
    return _token(stage) if found is None or found.token_after_pause is None else found.token_after_pause


def _token(stage: Stage) -> float:
    return 0.0 if stage.plan.prediction is None else stage.plan.prediction.token

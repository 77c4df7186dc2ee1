"""A tracker of one's own."""

from __future__ import annotations

from typing import Any

from bigmodel.train.tracking import GeneralTracker, on_main_process


class Remembering(GeneralTracker):
    """A user-defined tracker that records its calls in `seen`."""

    name = "remembering"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.seen

    @on_main_process
    def start(self) -> None:
        self.seen.append("start")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((values, step, kwargs))

    @on_main_process
    def finish(self) -> None:
        self.seen.append("finish")

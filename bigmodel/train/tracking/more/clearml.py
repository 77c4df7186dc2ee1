"""ClearML, online or offline (CLEARML_OFFLINE_MODE=1)."""

from __future__ import annotations

import os
from typing import Any

from ..base import LibraryTracker, as_number, flat, is_number, on_main_process

_SERIES = ("eval", "test", "train")


class ClearMLTracker(LibraryTracker):
    """Logs to a ClearML task: the current one, or a new one. Further arguments are those of `clearml.Task.init`.

    A new task's project and name are CLEARML_PROJECT and CLEARML_TASK, else both `run_name`.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._is_ours = True

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, also in nested dicts, as scalars, and strings as lines of the task's log.

        "eval_loss" is a point in plot "loss", series "eval"; likewise for "test_" and "train_". Any other name is a
        plot with the series "train". Without a step, a number is logged as a single value of the task.
        """
        logger = self.run.get_logger()
        for name, value in flat(values).items():
            if not is_number(value):
                logger.report_text(f"{name}: {value}")
            elif step is None:
                logger.report_single_value(name=name, value=as_number(value), **kwargs)
            else:
                logger.report_scalar(**_plot(name), value=as_number(value), iteration=step, **kwargs)

    def _begin(self) -> Any:
        from clearml import Task

        current = Task.current_task()
        self._is_ours = current is None
        if current is not None:
            return current
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.run_name),
        }
        return Task.init(**{**names, **self._kwargs})

    def _end(self) -> None:
        """Close the task, unless the program had started it before."""
        if self._is_ours:
            self.run.close()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays of shape (H, W, 3) or PIL images."""
        plot, logger = _plot(name), self.run.get_logger()
        many = images if isinstance(images, (list, tuple)) else [images]
        for number, image in enumerate(many):
            series = plot["series"] if len(many) == 1 else f"{plot['series']}_{number}"
            logger.report_image(plot["title"], series, iteration=step, image=image, **options)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        self.run.get_logger().report_table(**_plot(name), iteration=step, table_plot=[columns, *rows], **options)


def _plot(name: str) -> dict[str, str]:
    """Return the plot and the series for a name."""
    series, _, title = name.partition("_")
    return {"title": title, "series": series} if series in _SERIES and title else {"title": name, "series": "train"}

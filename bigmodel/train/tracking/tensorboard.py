"""TensorBoard: event files in a folder, written by torch.utils.tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .base import LibraryTracker, as_number, flat, is_number, markdown_table, on_main_process


class TensorBoardTracker(LibraryTracker):
    """Writes events under `logging_dir/run_name`. Further arguments are those of `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = Path(logging_dir) / run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters as an event, and write them to hparams.yml in the same folder."""
        plain = {name: _plain(value) for name, value in flat(values).items()}
        self.run.add_hparams(plain, metric_dict={})
        self.run.flush()
        path = self.logging_dir / "hparams.yml"
        path.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, dicts of numbers as groups of scalars, and all other values as text."""
        for name, value in values.items():
            if is_number(value):
                self.run.add_scalar(name, as_number(value), global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.run.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self.run.add_text(name, str(value), global_step=step, **kwargs)
        self.run.flush()

    def _begin(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.logging_dir), **self._kwargs)

    def _end(self) -> None:
        self.run.close()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays of shape (N, 3, H, W), or of the layout `dataformats`."""
        self.run.add_images(name, images, global_step=step, **options)
        self.run.flush()

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        """Tables are stored as Markdown text."""
        self.run.add_text(name, markdown_table(columns, rows), global_step=step, **options)
        self.run.flush()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else str(value)

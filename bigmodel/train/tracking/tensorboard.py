"""TensorBoard: event files in a folder, written by torch.utils.tensorboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .base import GeneralTracker, as_number, flat, is_number, on_main_process, table_rows


class TensorBoardTracker(GeneralTracker):
    """Writes events under `logging_dir/run_name`.

    Args:
        kwargs: arguments of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._kwargs = kwargs
        self._writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self._writer

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.logging_dir), **self._kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as an event and, beside it, in hparams.yml."""
        plain = {name: _plain(value) for name, value in flat(values).items()}
        self._writer.add_hparams(plain, metric_dict={})
        self._writer.flush()
        path = self.logging_dir / "hparams.yml"
        path.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become scalars, dicts of numbers a group of scalars, everything else text."""
        for name, value in values.items():
            if is_number(value):
                self._writer.add_scalar(name, as_number(value), global_step=step, **kwargs)
            elif isinstance(value, dict):
                self._writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self._writer.add_text(name, str(value), global_step=step, **kwargs)
        self._writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store batches of images by name: arrays of shape (N, 3, H, W), or as `dataformats` says."""
        for name, images in values.items():
            self._writer.add_images(name, images, global_step=step, **kwargs)
        self._writer.flush()

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a table, as a table of Markdown text."""
        names, rows = table_rows(columns, data, dataframe)
        lines = [" | ".join(names), " | ".join("---" for _ in names)]
        lines += [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
        self._writer.add_text(table_name, "\n".join(f"| {line} |" for line in lines), global_step=step, **kwargs)
        self._writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else str(value)

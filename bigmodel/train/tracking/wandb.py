"""Weights & Biases, online or offline (`init_kwargs={"wandb": {"mode": "offline"}}`)."""

from __future__ import annotations

from typing import Any

from .base import LibraryTracker, on_main_process


class WandBTracker(LibraryTracker):
    """Logs to a wandb run. Further arguments are those of `wandb.init`."""

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; further arguments are those of `wandb.log`."""
        self.run.log(values, step=step, **kwargs)

    def _begin(self) -> Any:
        import wandb

        return wandb.init(**{"project": self.run_name, **self._kwargs})

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        import wandb

        self.run.log({name: [wandb.Image(image, **options) for image in images]}, step=step)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        """Cells may be numbers, strings or wandb media."""
        import wandb

        self.run.log({name: wandb.Table(columns=list(columns), data=rows)}, step=step, **options)

"""Weights & Biases, online or offline (`init_kwargs={"wandb": {"mode": "offline"}}`)."""

from __future__ import annotations

from typing import Any

from .base import GeneralTracker, on_main_process, table_rows


class WandBTracker(GeneralTracker):
    """Logs to a run of wandb.

    Args:
        run_name: the project.
        kwargs: arguments of `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The wandb run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; further arguments are those of `wandb.log`."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name; further arguments are those of `wandb.Image`."""
        import wandb

        for name, images in values.items():
            self.run.log({name: [wandb.Image(image, **kwargs) for image in images]}, step=step)

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
        """Log a table; its cells may be numbers, texts or wandb's media."""
        import wandb

        names, rows = table_rows(columns, data, dataframe)
        self.run.log({table_name: wandb.Table(columns=list(names), data=rows)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()

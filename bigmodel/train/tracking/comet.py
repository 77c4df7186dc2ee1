"""Comet ML, online or offline (`init_kwargs={"comet_ml": {"online": False}}`)."""

from __future__ import annotations

from typing import Any

from .base import GeneralTracker, as_number, is_number, on_main_process, table_rows


class CometMLTracker(GeneralTracker):
    """Logs to an experiment of Comet.

    Args:
        run_name: the project.
        kwargs: arguments of `comet_ml.start`.
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._experiment: Any = None

    @property
    def tracker(self) -> Any:
        """The Comet experiment."""
        return self._experiment

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        self._experiment = comet_ml.start(**{"project_name": self.run_name, **self._kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters."""
        self._experiment.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become metrics, dicts of numbers a group of metrics, everything else "other" values."""
        if step is not None:
            self._experiment.set_step(step)
        for name, value in values.items():
            if is_number(value):
                self._experiment.log_metric(name, as_number(value), step=step, **kwargs)
            elif isinstance(value, dict):
                self._experiment.log_metrics(value, prefix=name, step=step, **kwargs)
            else:
                self._experiment.log_other(name, str(value), **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        for name, images in values.items():
            for number, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}_{number}"
                self._experiment.log_image(image, name=key, step=step, **kwargs)

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
        """Log a table as a CSV file."""
        names, rows = table_rows(columns, data, dataframe)
        name = table_name if table_name.endswith((".csv", ".tsv")) else f"{table_name}.csv"
        self._experiment.log_table(name, tabular_data=rows, headers=names, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment."""
        self._experiment.end()

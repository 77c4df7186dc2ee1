"""Comet ML, online or offline (`init_kwargs={"comet_ml": {"online": False}}`)."""

from __future__ import annotations

from typing import Any

from ..base import LibraryTracker, as_number, image_names, is_number, on_main_process


class CometMLTracker(LibraryTracker):
    """Logs to a Comet experiment. Further arguments are those of `comet_ml.start`."""

    name = "comet_ml"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, dicts of numbers as groups of metrics, and all other values as "other" values."""
        if step is not None:
            self.run.set_step(step)
        for name, value in values.items():
            if is_number(value):
                self.run.log_metric(name, as_number(value), step=step, **kwargs)
            elif isinstance(value, dict):
                self.run.log_metrics(value, prefix=name, step=step, **kwargs)
            else:
                self.run.log_other(name, str(value), **kwargs)

    def _begin(self) -> Any:
        import comet_ml

        return comet_ml.start(**{"project_name": self.run_name, **self._kwargs})

    def _end(self) -> None:
        self.run.end()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        for key, image in image_names(name, images, "_"):
            self.run.log_image(image, name=key, step=step, **options)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        """Tables are stored as CSV files."""
        file = name if name.endswith((".csv", ".tsv")) else f"{name}.csv"
        self.run.log_table(file, tabular_data=rows, headers=columns, **options)

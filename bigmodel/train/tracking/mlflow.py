"""MLflow: a tracking server, a database or a folder, named by MLFLOW_TRACKING_URI or `logging_dir`."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from .base import LibraryTracker, as_number, flat, is_number, on_main_process


class MLflowTracker(LibraryTracker):
    """Logs to an MLflow run.

    Args:
        experiment_name: the experiment; MLFLOW_EXPERIMENT_NAME takes precedence.
        logging_dir: tracking URI or folder of the runs; MLFLOW_TRACKING_URI takes precedence.
        run_id: an existing run to resume; MLFLOW_RUN_ID by default.
        tags: as in `mlflow.start_run`.
        nested_run: as in `mlflow.start_run`.
        run_name: as in `mlflow.start_run`.
        description: as in `mlflow.start_run`.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name))
        self._kwargs = {
            "run_id": os.environ.get("MLFLOW_RUN_ID", run_id),
            "nested": nested_run,
            "run_name": run_name,
            "tags": tags,
            "description": description,
        }
        self.logging_dir = os.environ.get("MLFLOW_TRACKING_URI") or logging_dir

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters, truncated to MLflow's maximum length and in batches of its maximum size."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        items = iter((name, str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in flat(values).items())
        while batch := dict(islice(items, MAX_PARAMS_TAGS_PER_BATCH)):
            mlflow.log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, also in nested dicts ("loss/train"), as metrics, and strings as tags."""
        import mlflow

        found = flat(values)
        metrics = {name: as_number(value) for name, value in found.items() if is_number(value)}
        mlflow.log_metrics(metrics, step=step)
        texts = {name: str(value) for name, value in found.items() if name not in metrics}
        if texts:
            mlflow.set_tags(texts)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib or plotly figure."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log a folder."""
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    def _begin(self) -> Any:
        import mlflow

        if self.logging_dir is not None:
            mlflow.set_tracking_uri(str(self.logging_dir))
        experiment = mlflow.set_experiment(self.run_name)
        return mlflow.start_run(experiment_id=experiment.experiment_id, **self._kwargs)

    def _end(self) -> None:
        import mlflow

        mlflow.end_run()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images, arrays of shape (H, W, 3), are stored as files "name_step_number.png"."""
        import mlflow

        for number, image in enumerate(images):
            mlflow.log_image(image, f"{name}_{step or 0}_{number}.png", **options)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        """Tables are stored as JSON files."""
        import mlflow

        mlflow.log_dict({"columns": columns, "data": rows}, f"{name}_{step or 0}.json", **options)

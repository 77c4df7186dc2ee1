"""MLflow: a tracking server, a database or a folder, as MLFLOW_TRACKING_URI or `logging_dir` says."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from .base import GeneralTracker, as_number, flat, is_number, on_main_process, table_rows


class MLflowTracker(GeneralTracker):
    """Logs to a run of MLflow.

    Args:
        experiment_name: the experiment; MLFLOW_EXPERIMENT_NAME wins over it.
        logging_dir: where runs are kept (a URI or a folder) unless MLFLOW_TRACKING_URI says.
        run_id: an existing run to go on with; MLFLOW_RUN_ID by default.
        tags, nested_run, run_name, description: as in `mlflow.start_run`.
    """

    name = "mlflow"
    requires_logging_directory = False

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
        super().__init__()
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = os.environ.get("MLFLOW_TRACKING_URI") or logging_dir
        self._arguments: dict[str, Any] = {
            "run_id": os.environ.get("MLFLOW_RUN_ID", run_id),
            "nested": nested_run,
            "run_name": run_name,
            "tags": tags,
            "description": description,
        }
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The active MLflow run."""
        return self._run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import mlflow

        if self.logging_dir is not None:
            mlflow.set_tracking_uri(str(self.logging_dir))
        experiment = mlflow.set_experiment(self.experiment_name)
        self._run = mlflow.start_run(experiment_id=experiment.experiment_id, **self._arguments)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, cut to the length and sent in the numbers MLflow takes."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        items = iter((name, str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in flat(values).items())
        while batch := dict(islice(items, MAX_PARAMS_TAGS_PER_BATCH)):
            mlflow.log_params(batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, also those of nested dicts ("loss/train"); texts are stored as tags."""
        import mlflow

        found = flat(values)
        metrics = {name: as_number(value) for name, value in found.items() if is_number(value)}
        mlflow.log_metrics(metrics, step=step)
        texts = {name: str(value) for name, value in found.items() if name not in metrics}
        if texts:
            mlflow.set_tags(texts)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images (arrays of shape (H, W, 3)) as files "name_step_number.png"."""
        import mlflow

        for name, images in values.items():
            for number, image in enumerate(images):
                mlflow.log_image(image, f"{name}_{0 if step is None else step}_{number}.png", **kwargs)

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
        """Store a table as a JSON file."""
        import mlflow

        names, rows = table_rows(columns, data, dataframe)
        mlflow.log_dict({"columns": names, "data": rows}, f"{table_name}_{0 if step is None else step}.json")

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a matplotlib or plotly figure."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file."""
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store a folder."""
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        import mlflow

        mlflow.end_run()

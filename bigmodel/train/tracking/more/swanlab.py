"""SwanLab, in the cloud or in a local folder (`init_kwargs={"swanlab": {"mode": "local"}}`)."""

from __future__ import annotations

from typing import Any

from ..base import LibraryTracker, flat, on_main_process


class SwanLabTracker(LibraryTracker):
    """Logs to a SwanLab run. Further arguments are those of `swanlab.init`."""

    name = "swanlab"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; strings are logged as SwanLab texts. Further arguments are those of `swanlab.log`."""
        import swanlab

        shown = {key: swanlab.Text(value) if isinstance(value, str) else value for key, value in flat(values).items()}
        self.run.log(shown, step=step, **kwargs)

    def _begin(self) -> Any:
        import swanlab

        return swanlab.init(**{"project": self.run_name, **self._kwargs})

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays of shape (H, W, 3), PIL images or paths."""
        import swanlab

        self.run.log({name: [swanlab.Image(image) for image in images]}, step=step, **options)

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        from swanlab import echarts

        table = echarts.Table()
        table.add(columns, rows)
        self.run.log({name: table}, step=step, **options)

"""Aim: runs in a repository folder, displayed by `aim up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base import LibraryTracker, as_number, flat, image_names, is_number, markdown_table, on_main_process


class AimTracker(LibraryTracker):
    """Logs to an Aim run in the repository `logging_dir`. Further arguments are those of `aim.Run`."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""
        self.run["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, also in nested dicts ("loss/train"), as metrics, and strings as Aim texts.

        Further arguments are those of `aim.Run.track`.
        """
        import aim

        for name, value in flat(values).items():
            tracked = as_number(value) if is_number(value) else value
            tracked = aim.Text(tracked) if isinstance(tracked, str) else tracked
            self.run.track(tracked, name=name, step=step, **kwargs)

    def _begin(self) -> Any:
        import aim

        run = aim.Run(**{"repo": str(self.logging_dir), **self._kwargs})
        run.name = self.run_name
        return run

    def _end(self) -> None:
        self.run.close()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        """Images are arrays or PIL images, or pairs with a caption: (image, "caption").

        `aim_image` and `track` are arguments of `aim.Image` and of `aim.Run.track`.
        """
        import aim

        options = options.get("kwargs") or options
        for key, image in image_names(name, images if isinstance(images, list) else [images], "/"):
            picture, caption = image if isinstance(image, tuple) else (image, "")
            shown = aim.Image(picture, **{"caption": caption, **options.get("aim_image", {})})
            self.run.track(shown, name=key, step=step, **options.get("track", {}))

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        """Tables are stored as Markdown text."""
        import aim

        self.run.track(aim.Text(markdown_table(columns, rows)), name=name, step=step, **options)

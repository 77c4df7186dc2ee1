"""Base classes of trackers, which log the hyperparameters, metrics, images and tables of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar

from bigmodel.errors import TrainError

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Run a tracker's method on the main process only, unless the tracker sets `main_process_only` to False."""

    @wraps(function)
    def run(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            from bigmodel.train.state.partial import PartialState

            if not PartialState().is_main_process:
                return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class GeneralTracker:
    """Base class of all trackers. Pass an instance of a subclass of your own in `Accelerator(log_with=...)`.

    A subclass defines `name`, `requires_logging_directory` and `tracker` (the library's own object), and overrides
    `store_init_configuration` and `log`.

    Attributes:
        main_process_only: only the main process logs.

    Raises:
        TrainError: the subclass lacks `name`, `requires_logging_directory` or `tracker`.
    """

    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [attribute for attribute in needed if not hasattr(type(self), attribute)]
        missing = [attribute for attribute in missing if attribute not in self.__dict__]
        if missing:
            raise TrainError(
                f"the tracker {type(self).__name__} lacks {', '.join(missing)}; define {' and '.join(missing)} on it"
            )

    def start(self) -> None:
        """Start the run: open files and connections."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name: numbers, strings or dicts of numbers."""

    def finish(self) -> None:
        """Finish the run: flush pending data."""


class LibraryTracker(GeneralTracker):
    """Base class of the built-in trackers, with the library's object for one run. Only the main process has one.

    A subclass creates that object in `_begin`, and logs images and tables in `_store_images` and `_store_table`.

    Args:
        run_name: name of the project in the library.
        kwargs: arguments for the library.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: Any = None
        self._kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The library's object: a run, an experiment, a writer."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run."""
        self.run = self._begin()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images for each name; further arguments are the library's."""
        for name, images in values.items():
            self._store_images(name, images, step, kwargs)

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
        """Log a table, given as columns and rows or as a dataframe; further arguments are the library's."""
        names, rows = table_rows(columns, data, dataframe)
        self._store_table(table_name, names, rows, step, kwargs)

    @on_main_process
    def finish(self) -> None:
        """Finish the run."""
        self._end()

    def _begin(self) -> Any:
        """Return the library's object for a new run."""
        raise NotImplementedError

    def _end(self) -> None:
        self.run.finish()

    def _store_images(self, name: str, images: Any, step: int | None, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _store_table(
        self, name: str, columns: list[str], rows: list[list[Any]], step: int | None, options: dict[str, Any]
    ) -> None:
        raise NotImplementedError


def image_names(name: str, images: Any, separator: str) -> list[tuple[str, Any]]:
    """Return each image with a distinct name; a single image has the given name."""
    return [(name if len(images) == 1 else f"{name}{separator}{number}", image) for number, image in enumerate(images)]


def is_number(value: Any) -> bool:
    """Whether a tracker can plot `value`: a number, or a tensor or array of one element."""
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "item") and getattr(value, "size", None) is not None and _elements(value) == 1


def as_number(value: Any) -> int | float:
    """Return the number in `value`, for which `is_number` is true."""
    return value if isinstance(value, (int, float)) else value.item()


def table_rows(
    columns: list[str] | None, data: list[list[Any]] | None, dataframe: Any
) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and rows of a table.

    Raises:
        TrainError: neither data nor a dataframe is given.
    """
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
    if data is None:
        raise TrainError("log_table needs columns and data, or a dataframe")
    return columns or [str(number) for number in range(len(data[0]) if data else 0)], data


def markdown_table(columns: list[str], rows: list[list[Any]]) -> str:
    """Return a table as Markdown, for libraries that display text only."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict, with names joined by slashes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}/"))
        else:
            found[prefix + str(name)] = value
    return found


def _elements(value: Any) -> int:
    return int(value.numel() if hasattr(value, "numel") else value.size)

"""Functions of other libraries that are replaced when they are imported, each only if it is as known."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .record import RECORD


@dataclass(frozen=True)
class Seam:
    """A function of another library that is replaced.

    Attributes:
        module: The module whose global name it is.
        function: Its name.
        parameters: The names of the parameters that it has in the versions this project knows.
        replacement: "module:function" here; gets the original as its first argument, then the call's own.
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    replacement: str

    @property
    def name(self) -> str:
        """How it is reported."""
        return f"{self.module}.{self.function}"

    @property
    def library(self) -> str:
        """The library that it is in."""
        return self.module.partition(".")[0]

    def put(self, module: ModuleType) -> None:
        """Replace the function in the imported module, and record that, or why not."""
        original = getattr(module, self.function, None)
        if original is None:
            RECORD.seams[self.name] = f"left alone: {self.library} has no such function"
            return
        present = tuple(inspect.signature(original).parameters)
        if present != self.parameters:
            RECORD.seams[self.name] = (
                f"left alone: it takes ({', '.join(present)}), and ({', '.join(self.parameters)}) is known"
            )
            return
        setattr(module, self.function, Replaced(original, self.replacement))
        RECORD.seams[self.name] = "in place"


class Replaced:
    """Calls a function of this project in place of another library's.

    Args:
        original: The other library's.
        replacement: "module:function" here, imported when it is first called.
    """

    def __init__(self, original: Callable[..., Any], replacement: str) -> None:
        self.original = original
        self._replacement = replacement
        self.__name__ = original.__name__
        self.__doc__ = original.__doc__
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        home, _, function = self._replacement.partition(":")
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        replacement = getattr(importlib.import_module(home), function)
        return replacement(self.original, **bound.arguments)


SEAMS: Sequence[Seam] = (
    Seam(
        "transformers.modeling_utils",
        "_get_device_map",
        ("model", "device_map", "max_memory", "hf_quantizer"),
        "bigmodel.compat.transformers_loading:device_map_of",
    ),
    Seam(
        "transformers.modeling_utils",
        "accelerate_disk_offload",
        ("model", "disk_offload_folder", "checkpoint_files", "device_map", "sharded_metadata", "weight_mapping"),
        "bigmodel.compat.transformers_loading:index_of",
    ),
    Seam(
        "transformers.modeling_utils",
        "accelerate_dispatch",
        ("model", "hf_quantizer", "device_map", "offload_folder", "offload_index", "offload_buffers"),
        "bigmodel.compat.transformers_loading:dispatch",
    ),
)


class SeamFinder(MetaPathFinder):
    """Finds modules that have seams as others do, and replaces the functions once the module has been executed.

    The modules of models are found by it, too: the first of them imports torch and most of transformers.
    """

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        seams = [seam for seam in SEAMS if seam.module == fullname]
        if not (seams or _is_of_model(fullname)) or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenPut(spec.loader, seams)
        return spec


def _is_of_model(module: str) -> bool:
    return module.startswith("transformers.models.") and ".modeling_" in module


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector: what an import makes stays, so collections meanwhile find nothing. They would take
    more time than all modules of the stand-in."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _ThenPut(Loader):
    """Executes a module by its own loader, then replaces its functions, if any."""

    def __init__(self, loader: Any, seams: Sequence[Seam]) -> None:
        self._loader = loader
        self._seams = seams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        with _without_collections():
            self._loader.exec_module(module)
        for seam in self._seams:
            seam.put(sys.modules[module.__name__])

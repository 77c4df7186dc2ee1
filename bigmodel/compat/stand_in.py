"""`install`: has `import accelerate` find this project, in this process and in those that it starts.

Two entries at the front of ``sys.meta_path``: `StandIn` finds the modules, and what ``importlib.metadata`` is told
about the distribution; `SeamFinder` watches for libraries whose own code is changed in a few places (`seams`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import bigmodel

from ..errors import CompatError
from ..train.environment import STANDS_IN
from . import children
from .seams import SEAMS, SeamFinder

NAME = "accelerate"
VERSION = f"1.15.0+bigmodel.{bigmodel.__version__}"

_PACKAGES = ("commands", "commands.config", "utils")
_MODULES = (
    "accelerator",
    "big_modeling",
    "commands.accelerate_cli",
    "commands.config.config_args",
    "commands.config.default",
    "commands.env",
    "commands.launch",
    "commands.merge",
    "commands.test",
    "commands.tpu",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils.ao",
    "utils.bnb",
    "utils.constants",
    "utils.dataclasses",
    "utils.deepspeed",
    "utils.environment",
    "utils.fsdp_utils",
    "utils.imports",
    "utils.launch",
    "utils.megatron_lm",
    "utils.memory",
    "utils.modeling",
    "utils.offload",
    "utils.operations",
    "utils.other",
    "utils.random",
    "utils.rich",
    "utils.torch_xla",
    "utils.tqdm",
    "utils.transformer_engine",
    "utils.versions",
)
MODULES = {f"{NAME}.{name}": f"bigmodel.{name}" for name in (*_PACKAGES, *_MODULES)}
"""The module of this project that each module of accelerate is. It is the same object: what is replaced in one is
replaced in the other."""

_TOP = "bigmodel.compat.accelerate"


def install() -> None:
    """Have `import accelerate` find this project from now on. A second call does nothing.

    Processes that this one starts through multiprocessing or `bigmodel launch` do the same.

    Raises:
        CompatError: accelerate, or a library that has asked for it, is imported already; the message names the first.
    """
    if is_installed():
        return
    first = _imported_before()
    if first is not None:
        raise CompatError(
            f"{first} is imported already, and it has looked for {NAME}: call bigmodel.compat.install() before it, "
            "or start the program with `bigmodel run`"
        )
    sys.meta_path.insert(0, SeamFinder())
    sys.meta_path.insert(0, StandIn())
    os.environ[STANDS_IN] = "1"
    children.inherit()


def is_installed() -> bool:
    """Whether `import accelerate` finds this project in this process."""
    return any(isinstance(finder, StandIn) for finder in sys.meta_path)


def _imported_before() -> str | None:
    """Return the first module, in the order of their import, that the stand-in comes too late for; None for none."""
    late = (NAME, *(seam.library for seam in SEAMS), *_ASK_EARLY)
    return next((name for name in sys.modules if name in late), None)


_ASK_EARLY = ("peft", "diffusers", "trl", "sentence_transformers", "lm_eval")
"""Libraries that ask for accelerate while they are imported."""


_ANY = DistributionFinder.Context()


class StandIn(DistributionFinder, Loader):
    """Finds the modules of accelerate and its distribution; what is in none of them is an ImportError."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == NAME:
            return ModuleSpec(fullname, self, is_package=True)
        if not fullname.startswith(f"{NAME}."):
            return None
        parent = fullname.rpartition(".")[0]
        if parent != NAME and parent not in MODULES:
            return None  # of a package that others have put there
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is not among the modules of {NAME} that bigmodel {bigmodel.__version__} stands in for",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=fullname.removeprefix(f"{NAME}.") in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what stands in sys.modules afterwards.
        name = module.__name__
        logging.getLogger(name)  # programs look the loggers of accelerate's modules up
        if name != NAME:
            sys.modules[name] = import_module(MODULES[name])
            return
        top = import_module(_TOP)
        module.__dict__.update(__version__=VERSION, __doc__=top.__doc__, __getattr__=_top_name, __dir__=top.__dir__)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, for ``python -m`` and what does as it does."""
        name = MODULES.get(fullname, _TOP)
        loader = getattr(find_spec(name), "loader", None)
        code: CodeType | None = None if loader is None else loader.get_code(name)
        return code

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterable[Distribution]:
        """Yield the distribution, if its name or none is asked for."""
        if context.name is None or context.name.lower() == NAME:
            yield StandInDistribution()


def _top_name(name: str) -> Any:
    """Return the name, or the module, of ``accelerate``."""
    if f"{NAME}.{name}" in MODULES:
        return import_module(f"{NAME}.{name}")
    try:
        return getattr(import_module(_TOP), name)
    except AttributeError:
        raise AttributeError(f"{NAME}, as bigmodel {bigmodel.__version__} stands in for it, has no {name!r}") from None


class StandInDistribution(Distribution):
    """Metadata of accelerate for ``importlib.metadata``."""

    def read_text(self, filename: str) -> str | None:
        # Libraries tell accelerate from other distributions of its name by the home page.
        page = "https://github.com/huggingface/accelerate"
        lines: Mapping[str, str] = {"Metadata-Version": "2.1", "Name": NAME, "Version": VERSION, "Home-page": page}
        if filename != "METADATA":
            return None
        return "".join(f"{key}: {value}\n" for key, value in lines.items())

    def locate_file(self, path: Any) -> Any:
        return Path(bigmodel.__file__).parent / path

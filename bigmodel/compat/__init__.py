"""Standing in for accelerate under other libraries: with `install`, `import accelerate` is this project.

    import bigmodel.compat

    bigmodel.compat.install()  # before accelerate, transformers or any library that imports them

Without `install` nothing outside this package is changed. `bigmodel run script.py` does the same for a whole program,
and `%load_ext bigmodel.compat` for a notebook.
"""

from typing import Any

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)


def load_ipython_extension(_: Any) -> None:
    """Install; called by `%load_ext bigmodel.compat`."""
    from .stand_in import install

    install()

"""Train: the Accelerator and the objects that it prepares. The names are listed in `__init__.pyi`."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

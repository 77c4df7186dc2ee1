"""The names of ``accelerate`` itself, as the stand-in gives them."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

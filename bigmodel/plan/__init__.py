"""Plan: numbers in, plan out. No tensor is touched here."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

"""Profiles: the needs of a model and the rates of a machine, known before any weight is read."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

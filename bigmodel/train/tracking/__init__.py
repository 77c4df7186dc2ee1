"""Tracking: a run's configuration, numbers, images and tables, sent to the tools that show them."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

"""Experiment tracking: hyperparameters, metrics, images and tables of a run, sent to tracking libraries."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

"""Runs a model over several nodes by a plan for them: each process of torchrun loads and runs one stage."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

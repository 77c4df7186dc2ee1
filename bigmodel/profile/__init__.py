"""Profile: what a model needs and what a machine gives, before any weight is read."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

"""The HTTP server: an OpenAI-compatible API over a dispatched model."""

from bigmodel.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__)

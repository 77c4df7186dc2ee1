"""The HTTP server: an OpenAI-compatible API over a dispatched model."""

from server.app import Loaded, create_app
from server.batch import Generation, generate_batch
from server.engine import Engine, EngineOptions, SamplingParams
from server.state import Loading, Settings

__all__ = [
    "Engine",
    "EngineOptions",
    "Generation",
    "Loaded",
    "Loading",
    "SamplingParams",
    "Settings",
    "create_app",
    "generate_batch",
]

"""The engine: continuous batching of requests over one model."""

from server.engine.build import build_engine
from server.engine.engine import Engine, EngineStoppedError, QueueFullError, State
from server.engine.options import EngineOptions
from server.engine.params import SamplingParams
from server.engine.request import Delta, Done, Event, Failed, Request, TokenLogprob

__all__ = [
    "Delta",
    "Done",
    "Engine",
    "EngineOptions",
    "EngineStoppedError",
    "Event",
    "Failed",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "State",
    "TokenLogprob",
    "build_engine",
]

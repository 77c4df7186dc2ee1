"""The HTTP server: an OpenAI-compatible API over a dispatched model."""

from server.app import Loaded, create_app
from server.engine import Engine, EngineOptions
from server.state import Loading, Settings

__all__ = ["Engine", "EngineOptions", "Loaded", "Loading", "Settings", "create_app"]

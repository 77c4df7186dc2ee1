"""The HTTP server: an OpenAI-compatible API over a dispatched model."""

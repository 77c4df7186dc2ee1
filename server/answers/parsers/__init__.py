"""Incremental parsers of model output: they separate reasoning and tool calls from the answer."""

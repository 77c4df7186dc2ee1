"""Parsers of what models write: reasoning and tool calls are told from the answer, piece by piece."""

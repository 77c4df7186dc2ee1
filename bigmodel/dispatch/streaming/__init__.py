"""Mechanism: blocks that are streamed to a device through slots."""

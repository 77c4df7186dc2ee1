"""Mechanism: blocks that visit a device through slots."""

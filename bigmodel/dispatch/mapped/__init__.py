"""Mechanism: blocks that the host computes with in memory-mapped files."""

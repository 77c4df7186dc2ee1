"""Mechanism: blocks in memory-mapped files that the host computes with in place."""

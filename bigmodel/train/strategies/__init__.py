"""Strategies: how the processes of a run share one model."""

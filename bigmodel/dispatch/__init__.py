"""Dispatch: makes a planned model run."""

"""Traces of forwards, recorded on fake tensors."""

"""Measured speeds of a machine."""

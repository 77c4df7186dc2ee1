"""Bytes that an assignment takes on each device."""

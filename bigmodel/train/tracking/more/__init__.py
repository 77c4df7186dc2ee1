"""Trackers of less common tools, imported when one is asked for by name."""

"""Trackers of less common libraries, imported on first use."""

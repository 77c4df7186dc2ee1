"""Predicted seconds of an assignment."""

"""Verify: a plan held against what is measured."""

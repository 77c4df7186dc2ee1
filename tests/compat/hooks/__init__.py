"""Hooks in accelerate's protocol."""

"""Tests that others wrote, fetched when they are run and run word for word under the stand-in (`make compat`)."""

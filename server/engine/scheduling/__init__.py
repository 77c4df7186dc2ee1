"""Requests, their sequences, and which tokens the next step computes."""

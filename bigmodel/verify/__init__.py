"""Verification of plans: predictions compared with measurements."""

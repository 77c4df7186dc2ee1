"""Mechanism: experts of a mixture that are fetched one by one."""

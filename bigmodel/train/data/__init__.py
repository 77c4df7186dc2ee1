"""Data loading: each process's part of the data, in a reproducible order."""

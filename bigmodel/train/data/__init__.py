"""Data loading: each process's part of the data, in an order that can be repeated."""

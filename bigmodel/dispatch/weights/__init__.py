"""Streamed blocks: their weights, layout in memory and quantised form; visits and counters."""

"""One file per question; peers side by side; results kept as data."""

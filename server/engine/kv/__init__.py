"""Keys and values: buffers of sequences, the pool of positions, the prefix cache."""

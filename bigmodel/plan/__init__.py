"""Plan: numbers in, plan out. No tensor is touched in this room."""

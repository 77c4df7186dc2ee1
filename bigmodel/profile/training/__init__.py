"""Memory of training."""

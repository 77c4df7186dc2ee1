"""Programs to read and run: the demonstration, and training scripts."""

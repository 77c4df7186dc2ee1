"""The formats in which weights are published, one file each."""

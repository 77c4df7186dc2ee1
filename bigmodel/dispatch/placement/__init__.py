"""Placement: the storage and execution device of every tensor of a model, by a device map or a plan."""

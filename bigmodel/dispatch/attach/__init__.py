"""Attachment: the replaced forwards of a dispatched model's modules, and how they are built and removed."""

"""Attachment: what a dispatched model's modules carry."""

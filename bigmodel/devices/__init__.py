"""Devices: what a device is, what it holds, and how bytes reach it."""

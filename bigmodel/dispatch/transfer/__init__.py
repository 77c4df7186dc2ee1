"""Mechanism: how bytes get from files and host memory to a device."""

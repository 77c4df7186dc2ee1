"""Mechanism: transfers of blocks from files and host memory to a device."""

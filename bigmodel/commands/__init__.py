"""The names of ``accelerate.commands``: what the commands `bigmodel config` and `bigmodel launch` are made of."""

"""Launch: configuration files and process launch."""

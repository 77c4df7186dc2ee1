"""Sources: a model's folder or repository: config, index, headers, remote ranges."""

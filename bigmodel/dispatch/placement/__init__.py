"""Where every tensor of a model goes, by a device map or a plan."""

"""HTTP: bodies in, engine requests out, engine events back as responses."""

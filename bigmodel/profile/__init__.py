"""Profile: what a model needs and what a machine gives, before any weight is read."""

"""What a machine gives, measured."""

"""What a placement takes of each device."""

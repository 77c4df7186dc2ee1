"""What a placement takes in seconds."""

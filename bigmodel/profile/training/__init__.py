"""What training takes."""

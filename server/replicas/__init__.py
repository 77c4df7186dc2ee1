"""Optional: several copies of the server behind one address, through Ray Serve (`pip install bigmodel[ray]`)."""

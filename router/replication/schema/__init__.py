"""What the shared index keeps, byte by byte, and the scripts that change it."""

"""The writing side of the shared index."""

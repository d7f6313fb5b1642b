"""A set-up of the last release, kept as its own files, and what the present version makes of it."""

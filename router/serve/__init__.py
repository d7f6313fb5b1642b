"""A router as a process: start, reload, end."""

"""The router as a process: start, reload, shutdown."""

"""Prompts read by somebody else: an engine, or a render server."""

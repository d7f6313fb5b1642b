"""Requests that are kept back while the engines they fit have enough to do."""

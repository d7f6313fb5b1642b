"""Connections to a Redis or Valkey server."""

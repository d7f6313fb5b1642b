"""Residency shared by several routers through Redis or Valkey."""

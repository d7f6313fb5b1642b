"""Engines found by DNS."""

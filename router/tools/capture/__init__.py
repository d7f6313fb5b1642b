"""Captures: recorded event frames in a file."""

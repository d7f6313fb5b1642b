"""Presence rows in memory."""

"""Residency of every engine, and the hit it predicts."""

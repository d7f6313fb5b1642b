"""Tiers of blocks outside the GPU, and their eviction policies."""

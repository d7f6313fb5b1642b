"""Prompts that are computed on one engine for another: the choice of both, and their places in the books."""

"""``kvatlas record``: event frames of live feeds into a capture."""

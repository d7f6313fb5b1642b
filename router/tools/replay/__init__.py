"""``kvatlas replay``: a capture played through the serving code."""

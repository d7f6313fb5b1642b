"""``kvatlas verify``: recorded truth against the serving code."""

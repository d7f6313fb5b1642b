"""``kvatlas index``: a shared index seen from outside."""

"""``kvatlas advise``: what to set, from trials on one's own traffic."""

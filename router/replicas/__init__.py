"""Several routers as one: who follows which engine's feed, and what each knows of the others' work."""

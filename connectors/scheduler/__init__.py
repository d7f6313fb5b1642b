"""The scheduler's half of a connector: what to load and store, and what becomes of it."""

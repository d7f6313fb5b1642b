"""Facts learned from an engine's events: layout, hash scheme, removal semantics."""

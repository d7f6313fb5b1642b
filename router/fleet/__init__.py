"""Which engines exist."""

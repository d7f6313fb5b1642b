"""Which replica follows which engine."""

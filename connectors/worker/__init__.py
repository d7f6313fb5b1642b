"""The worker half of a connector: rows, transfers, and staging for a shared store."""

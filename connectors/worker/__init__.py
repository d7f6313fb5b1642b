"""The worker's half of a connector: rows, transfers, and the way to a store."""

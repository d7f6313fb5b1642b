"""The side of clients: connections, exchanges, limits, drain."""

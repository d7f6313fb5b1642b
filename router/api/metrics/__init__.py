"""The Prometheus page of a router."""

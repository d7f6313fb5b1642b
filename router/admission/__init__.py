"""Admission of requests: keys, tenants and their limits."""

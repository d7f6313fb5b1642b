"""Engines found in Kubernetes."""

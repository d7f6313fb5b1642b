"""Engines found in Kubernetes: objects and their picture (pure), and the API's list and watch."""

"""Prefill and decode apart: the simulated engine's side of vLLM's NixlConnector, pull mode."""

"""Engines found by DNS: questions and answers on the wire, a small resolver, and the source on it."""

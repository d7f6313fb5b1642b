"""OpenAI-compatible byte pass-through between clients and engines."""

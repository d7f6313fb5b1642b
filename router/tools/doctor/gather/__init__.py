"""Collection of evidence: HTTP responses, metrics, events, prompts and probes."""

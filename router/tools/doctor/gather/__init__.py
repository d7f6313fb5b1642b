"""What the doctor asks and hears: HTTP answers, metrics, events, prompts and probes."""

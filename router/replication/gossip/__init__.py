"""What replicas tell each other: prompts in flight and load."""

"""What is computed here: one model's prompts, and what is kept of them for next turns."""

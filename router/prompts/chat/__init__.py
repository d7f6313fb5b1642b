"""From messages to the text of a model's chat template."""

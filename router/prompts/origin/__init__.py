"""Where a model's tokenizer comes from: a directory, or a repository of the hub, compared first."""

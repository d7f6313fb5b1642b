"""The hit rules: from presence rows to tokens."""

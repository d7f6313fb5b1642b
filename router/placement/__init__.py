"""Which engine should answer: cost, load account, choice."""

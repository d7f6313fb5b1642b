"""``kvatlas explain``: why a prompt hits as far as it does."""

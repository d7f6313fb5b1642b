"""From messages to the text a model's chat template makes of them."""

"""One request of a gateway, from its head to the end of its answer."""

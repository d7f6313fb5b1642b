"""Several routers as one: shared residency, leases and gossip through Redis or Valkey."""

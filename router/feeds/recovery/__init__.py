"""How a feed becomes whole again: replay and snapshots."""

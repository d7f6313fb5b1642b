"""Engine side: what is said on the wire about KV blocks, and who says it."""

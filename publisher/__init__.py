"""Engine side: KV events on the wire, their publisher, and a simulated engine."""

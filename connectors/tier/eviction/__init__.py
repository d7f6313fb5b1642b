"""Which block gives way when a tier is full."""

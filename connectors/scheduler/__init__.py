"""The scheduler half of a connector: plans of loads and stores, and their jobs."""

"""Who may send requests, and how many: keys, tenants and their limits."""

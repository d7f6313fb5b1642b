"""Fleet side: which engine holds what, which one should answer, and how the request gets there."""

"""Who asks what, and when."""

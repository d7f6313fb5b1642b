"""Command-line tools that share the serving code."""

"""The router's configuration: schema, loading and checks."""

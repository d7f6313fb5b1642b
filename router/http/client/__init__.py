"""The side of engines: connections and their pool."""

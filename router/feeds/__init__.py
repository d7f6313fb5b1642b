"""One engine's event stream, turned into ordered batches."""

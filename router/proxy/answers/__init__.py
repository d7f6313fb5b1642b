"""What engines answer, on its way to the client."""

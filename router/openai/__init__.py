"""What clients may send and see: requests, bodies, errors."""

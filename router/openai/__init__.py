"""The clients' side of the API: requests, bodies, errors."""

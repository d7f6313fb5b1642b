"""The authenticated API that changes which engines there are; off unless configured."""

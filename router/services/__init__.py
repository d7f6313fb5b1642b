"""Optional services beside serving: the endpoint picker for gateways, and sources of engines."""

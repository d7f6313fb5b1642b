"""Beside a decode engine behind a gateway: makes both requests, as the endpoint picker has chosen."""

"""``kvatlas demo``: simulated engines, the router and a chat load on one machine, with a live table."""

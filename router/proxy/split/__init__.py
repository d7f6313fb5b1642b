"""A request on two engines: both requests, one after the other or at once."""

"""How much one engine has to do, what we sent it and what others did, and how fast it works."""

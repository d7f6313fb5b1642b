"""``kvatlas doctor``: what is wrong with engines, events and routers."""

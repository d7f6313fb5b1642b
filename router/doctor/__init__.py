"""``kvatlas doctor``: looks at engines and a router as kvatlas would use them, and says what is wrong."""

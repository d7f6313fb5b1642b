"""Other routers' placement, for comparison in simulations: their formulas, and what they know of engines."""

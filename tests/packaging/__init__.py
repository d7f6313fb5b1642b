"""Build and installation: the wheel, its one name, its dependencies."""

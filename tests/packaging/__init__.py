"""What is built and installed: the wheel, its one name, its dependencies."""

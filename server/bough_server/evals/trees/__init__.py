"""Agent trees, as they ran and as cases expect them."""

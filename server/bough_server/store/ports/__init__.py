"""The ports of the store: protocols, and the values that they exchange."""

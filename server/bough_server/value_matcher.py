"""Compare JSON values and texts with the matchers of eval sets."""

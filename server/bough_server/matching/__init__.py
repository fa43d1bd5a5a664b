"""Values and texts compared with expected ones, by rules that callers bring, in a bounded number of steps."""

"""The commands of `bough eval`."""

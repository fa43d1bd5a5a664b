"""Bough's client: stubs under `bough.v1`."""

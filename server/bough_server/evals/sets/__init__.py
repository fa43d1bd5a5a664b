"""Eval sets: read, validated, and made from runs."""

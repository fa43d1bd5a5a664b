"""Rendering of events and records as lines of text."""

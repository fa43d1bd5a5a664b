"""Agents, tools and metrics for Bough."""

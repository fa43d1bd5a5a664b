"""Spans of agents, model calls and tools by OpenTelemetry's GenAI conventions; no content unless the operator asks."""

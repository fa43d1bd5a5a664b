"""YAML, JSON and messages of the schema as texts, with their line numbers."""

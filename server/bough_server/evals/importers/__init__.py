"""Importers of the eval sets, metrics and results of other tools, and the export of results for them."""

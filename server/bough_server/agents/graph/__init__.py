"""Graphs: typed nodes, the edges between them, and the scheduler that visits them."""

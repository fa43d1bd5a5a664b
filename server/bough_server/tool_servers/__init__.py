"""Programs outside that serve tools: their settings, connections, lists of tools and calls."""

"""The store on SQL: one SQLite file, one thread that writes it, a few that read it."""

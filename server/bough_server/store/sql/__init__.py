"""The store on SQL: one SQLite file, one writer thread, and a few reader threads."""

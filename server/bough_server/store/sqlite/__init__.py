"""The store on a SQLite file that one server writes."""

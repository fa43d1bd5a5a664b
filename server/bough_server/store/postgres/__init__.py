"""The store on PostgreSQL, which many servers share."""

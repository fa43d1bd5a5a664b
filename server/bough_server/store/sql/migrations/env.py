"""The script that Alembic runs to migrate, on the caller's connection and inside the caller's transaction."""

from alembic import context

from bough_server.store.sql.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()

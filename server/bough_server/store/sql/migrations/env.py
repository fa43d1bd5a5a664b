"""What Alembic runs to migrate: on the connection and in the transaction it is given; it opens none of its own."""

from alembic import context

from bough_server.store.sql.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()

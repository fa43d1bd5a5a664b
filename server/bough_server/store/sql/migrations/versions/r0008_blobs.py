"""The files of messages, and the sessions that refer to them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create both tables, empty: logs of earlier versions hold the bytes of their files themselves."""
    op.create_table(
        "blobs",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sha256", sa.String(), primary_key=True, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "session_blobs",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("session_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sha256", sa.String(), primary_key=True, nullable=False),
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("sessions_of_blob", "session_blobs", ["tenant_id", "sha256", "session_id"])

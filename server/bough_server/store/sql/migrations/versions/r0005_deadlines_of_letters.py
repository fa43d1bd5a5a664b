"""Until when the caller of answers that go by letter wants their run to have ended."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Letters that wait keep what they say, and have no deadline."""
    op.add_column("letters", sa.Column("deadline_time_ns", sa.Integer(), nullable=True))

"""The tools of the support desk, over a database in a file beside this one, which is made when it is first used."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bough_server import ToolContext, tool

DATABASE = Path(__file__).with_name("shop.sqlite3")
WEEK = 7 * 24 * 60 * 60
LARGE = 50

_TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, email TEXT, article TEXT, price REAL);
CREATE TABLE IF NOT EXISTS refunds (key TEXT PRIMARY KEY, order_id INTEGER, amount REAL);
INSERT OR IGNORE INTO orders VALUES (1001, 'ann@example.com', 'desk lamp', 39);
INSERT OR IGNORE INTO orders VALUES (1002, 'ann@example.com', 'floor lamp', 129);
"""


@contextmanager
def shop() -> Iterator[sqlite3.Connection]:
    """Open the database for one transaction. Tools run in threads, so each call has a connection for itself."""
    with closing(sqlite3.connect(DATABASE, timeout=5)) as connection:
        connection.executescript(_TABLES)
        with connection:
            yield connection


@tool
def find_orders(email: str) -> str:
    """Find a customer's orders, as a JSON list.

    Args:
        email: The customer's address.
    """
    with shop() as connection:
        rows = connection.execute("SELECT id, article, price FROM orders WHERE email = ? ORDER BY id", (email,))
        return json.dumps([dict(zip(("order_id", "article", "price"), row, strict=True)) for row in rows])


def is_large(arguments: Mapping[str, Any]) -> bool:
    """Return whether a refund needs an approval. Depends on the arguments alone, so a replay decides the same."""
    return bool(arguments["amount"] > LARGE)


# After a crash the call is made again with the same key, of which the database keeps one refund: no customer is paid
# twice. A tool that cannot tell has `on_recovery="ask"`.
@tool(approval=is_large, answer_within=WEEK)
def refund(order_id: int, amount: float, ctx: ToolContext) -> str:
    """Pay an order back, all of it or a part.

    Args:
        order_id: The number of the order.
        amount: How much, in EUR.
    """
    with shop() as connection:
        order = connection.execute("SELECT price FROM orders WHERE id = ?", (order_id,)).fetchone()
        if order is None:
            raise ValueError(f"there is no order {order_id}")
        others = "SELECT coalesce(sum(amount), 0) FROM refunds WHERE order_id = ? AND key <> ?"
        (paid,) = connection.execute(others, (order_id, ctx.idempotency_key)).fetchone()
        if not 0 < amount <= order[0] - paid:
            raise ValueError(f"of order {order_id}, {order[0] - paid:g} EUR can be paid back")
        values = (ctx.idempotency_key, order_id, amount)
        connection.execute("INSERT OR IGNORE INTO refunds VALUES (?, ?, ?)", values)
    return f"{amount:g} EUR are paid back for order {order_id}, receipt {ctx.idempotency_key[:8]}."

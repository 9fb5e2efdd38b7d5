"""A shop that asks for a confirmation of each order in the transaction that stores the order.

Needs a Postgres of the shop's own in SHOP_DATABASE_URL, with the table of
`fencepost relay --print-ddl` in it. The relay makes the runs; docs/outbox.md has all commands.
"""

from __future__ import annotations

import asyncio
import json
import os

import asyncpg

TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    order_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    cents bigint NOT NULL CHECK (cents > 0)
)
"""
ORDER = "INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING order_id"
# Nothing of Fencepost is imported or called: a row of this table is the whole request.
CONFIRM = "INSERT INTO fencepost_outbox (job, payload, labels) VALUES ('confirm-order', $1, $2)"


async def place_order(shop: asyncpg.Connection, customer: str, cents: int) -> int:
    """Stores the order and asks for its confirmation: both, or neither."""
    async with shop.transaction():
        order_id: int = await shop.fetchval(ORDER, customer, cents)
        payload = json.dumps({"order_id": order_id, "customer": customer})
        await shop.execute(CONFIRM, payload, json.dumps({"customer": customer}))
        if cents > 1_000_000:
            raise ValueError(f"{customer} cannot pay {cents / 100:.2f}")
    return order_id


async def main() -> None:
    """Three orders, one of which is rolled back together with its confirmation."""
    shop = await asyncpg.connect(os.environ["SHOP_DATABASE_URL"])
    try:
        await shop.execute(TABLES)
        for customer, cents in (("Ada", 4_200), ("Grace", 99_999_900), ("Edsger", 1_100)):
            try:
                print(f"order {await place_order(shop, customer, cents)} of {customer}")
            except ValueError as error:
                print(f"no order: {error}")
    finally:
        await shop.close()


if __name__ == "__main__":
    asyncio.run(main())

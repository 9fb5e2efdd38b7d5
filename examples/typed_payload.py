"""Typed input and output: dataclasses here, and pydantic models in just the same way.

An input that does not fit the type fails for good, with the field's name, before the
handler is called. Run it with `enqueue` as its argument to give the worker something to do.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from fencepost import AlreadyExists, Client, Context, Fatal, Worker

client = Client("localhost:7600")
worker = Worker(client, queues=["default"])


@dataclass(frozen=True)
class Invoice:
    """What the producer sends."""

    number: str
    cents: int
    email: str | None = None


@dataclass(frozen=True)
class Receipt:
    """What the handler returns."""

    number: str
    sent_to: str


@worker.handler("invoice.send")
async def send(invoice: Invoice, ctx: Context) -> Receipt:
    """Sends an invoice once, however often it is attempted."""
    if invoice.email is None:
        raise Fatal("NO_ADDRESS", f"invoice {invoice.number} names no e-mail address")
    # Stable over retries and replays: a mail service that knows the key acts only once.
    await _mail(invoice.email, idempotency_key=ctx.idempotency_key)
    return Receipt(number=invoice.number, sent_to=invoice.email)


async def _mail(address: str, *, idempotency_key: str) -> None:
    print(f"mailing {address}, key {idempotency_key}")


async def enqueue() -> None:
    """Makes the job if need be, and one run of it."""
    async with client:
        try:
            await client.create_job("send-invoice", kind="invoice.send")
        except AlreadyExists:
            print("send-invoice is already there")
        invoice = Invoice(number="2026-0042", cents=1999, email="ada@example.org")
        run = await client.enqueue("send-invoice", invoice)
        print(run.name)


if __name__ == "__main__":
    if sys.argv[1:] == ["enqueue"]:
        asyncio.run(enqueue())
    else:
        worker.run()

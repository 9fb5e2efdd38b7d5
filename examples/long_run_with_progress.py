"""A long handler that reports progress, resumes from its checkpoint, and stops when asked.

Kill this worker with Ctrl-C in the middle of a run and start it again: the next attempt
goes on at the page the first one had reached.
"""

from __future__ import annotations

import asyncio
import logging

from fencepost import Client, Context, Retryable, Snooze, Worker

PAGES = 60

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
worker = Worker(Client("localhost:7600"), queues=["default"], slots=2, grace=5)


@worker.handler("report.build")
async def build(ctx: Context) -> dict[str, int]:
    """One page per second."""
    if not await _printer_is_free():
        raise Snooze(minutes=5, reason="the printer is busy")  # costs no retry

    first = ctx.last_checkpoint() or 0
    for page in range(first, PAGES):
        try:
            await _render(page)
        except ConnectionError as error:
            raise Retryable("PRINTER_GONE", str(error), after=30) from error
        # Kept with the run: the next attempt, here or elsewhere, starts after this page.
        ctx.progress(100 * (page + 1) / PAGES, f"page {page + 1}", checkpoint=page + 1)
    return {"pages": PAGES, "rendered_by_this_attempt": PAGES - first}


async def _printer_is_free() -> bool:
    return True


async def _render(page: int) -> None:
    # A cancel, a lost lease or a shutdown arrives here as asyncio.CancelledError.
    await asyncio.sleep(1)


if __name__ == "__main__":
    worker.run()

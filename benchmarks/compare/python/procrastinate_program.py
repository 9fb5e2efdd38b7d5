"""procrastinate on psycopg, with many jobs at a time and notifications."""
# mypy: disable-error-code="import-not-found, untyped-decorator, unused-ignore, import-untyped"

import logging
from collections.abc import Awaitable, Callable

import uvloop
from procrastinate import App, PsycopgConnector
from program import main

_FILL = 5000
_CONCURRENCY = 30


def _app(dsn: str) -> App:
    return App(connector=PsycopgConnector(conninfo=dsn, min_size=4, max_size=_CONCURRENCY + 4))


class Procrastinate:
    """See `program.Queue`."""

    async def prepare(self, dsn: str) -> None:
        async with _app(dsn).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def fill(self, dsn: str, number: int) -> None:
        async with _app(dsn).open_async() as app:
            deferrer = app.configure_task("noop")
            for start in range(0, number, _FILL):
                size = min(_FILL, number - start)
                await deferrer.batch_defer_async(*({"at": 0.0} for _ in range(size)))

    async def work(self, dsn: str, name: str, handle: Callable[[float], None]) -> None:
        app = _app(dsn)

        @app.task(name=name)
        async def handler(at: float) -> None:
            handle(at)

        async with app.open_async():
            await app.run_worker_async(concurrency=_CONCURRENCY, listen_notify=True)

    async def produce(
        self, dsn: str, loop: Callable[[Callable[[float], Awaitable[None]]], Awaitable[None]]
    ) -> None:
        async with _app(dsn).open_async() as app:

            async def send(at: float) -> None:
                await app.configure_task("stamp").defer_async(at=at)

            await loop(send)


if __name__ == "__main__":
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    # Its worker handles SIGTERM by itself.
    uvloop.run(main(Procrastinate()))

"""Creates a job that fires every minute, and shows what the server made of it."""

from __future__ import annotations

import asyncio

from fencepost import AlreadyExists, Client, cron


async def main() -> None:
    """Safe to run twice."""
    async with Client("localhost:7600") as client:
        try:
            job = await client.create_job(
                "hello-every-minute",
                kind="hello",
                queue="default",
                schedule=cron("* * * * *", time_zone="Europe/Paris"),
                payload="Ada",
                labels={"team": "examples"},
            )
        except AlreadyExists:
            job = await client.get_job("hello-every-minute")
        print(f"{job.name} fires next at {job.next_run_at.ToJsonString()}")
        async for other in client.list_jobs():
            print(f"  known: {other.name}")


if __name__ == "__main__":
    asyncio.run(main())

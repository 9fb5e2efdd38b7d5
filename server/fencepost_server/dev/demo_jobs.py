"""Creates the demo jobs where they are missing, and tells of the first run that succeeds."""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import grpc.aio
from fencepost import AlreadyExists, Client, FencepostError, cron, every
from fencepost.v1 import job_pb2, run_pb2, run_service_pb2, run_service_pb2_grpc
from google.protobuf.duration_pb2 import Duration

NAMES = ("hello", "flaky", "slow", "nightly")
_LOOK_S = 0.25

_JOBS: Mapping[str, Mapping[str, Any]] = {
    "hello": {
        "kind": "demo.hello",
        "schedule": every(5),
        "payload": {"name": "world"},
        "description": "Every five seconds.",
    },
    "flaky": {
        "kind": "demo.flaky",
        "schedule": every(20),
        "payload": {},
        "retry_policy": job_pb2.RetryPolicy(base=Duration(seconds=1), cap=Duration(seconds=5)),
        "description": "Fails at every first attempt, and recovers.",
    },
    "slow": {
        "kind": "demo.slow",
        "schedule": every(30),
        "payload": {},
        "description": "Takes six seconds and reports its progress.",
    },
    "nightly": {
        "kind": "demo.hello",
        "schedule": cron("30 2 * * *", time_zone="Europe/Berlin"),
        "payload": {"name": "night"},
        "description": "Half past two in Berlin, also on the days when clocks change.",
    },
}


async def create_demo_jobs(address: str) -> list[str]:
    """Creates what is missing, leaves what is there; returns the names created."""
    created: list[str] = []
    async with Client(address) as client:
        for name in NAMES:
            try:
                await client.create_job(name, labels={"demo": "true"}, **_JOBS[name])
            except AlreadyExists:
                continue
            created.append(name)
    return created


async def newest_success(runs: "run_service_pb2_grpc.RunServiceAsyncStub") -> run_pb2.Run | None:
    """The newest succeeded run of the job hello."""
    request = run_service_pb2.ListRunsRequest(
        parent="tenants/default/jobs/hello", filter="state=SUCCEEDED", page_size=1
    )
    found = (await runs.ListRuns(request, timeout=10)).runs
    return found[0] if found else None


async def first_new_success(address: str) -> run_pb2.Run:
    """Waits for a run of hello that succeeds from now on."""
    async with grpc.aio.insecure_channel(address) as channel:
        runs = run_service_pb2_grpc.RunServiceStub(channel)
        before = await newest_success(runs)
        while True:
            newest = await newest_success(runs)
            if newest is not None and (before is None or newest.name != before.name):
                return newest
            await asyncio.sleep(_LOOK_S)


async def main(address: str) -> None:
    """Say what was done, in lines for the log of `fencepost dev`."""
    created = await create_demo_jobs(address)
    print(f"created {', '.join(created)}" if created else "the demo jobs are there", flush=True)
    run = await first_new_success(address)
    _, _, _, job, _, scheduled_at = run.name.split("/")
    took_ms = (run.ended_at.ToMicroseconds() - run.key.scheduled_at.ToMicroseconds()) / 1000
    print(
        f"first run succeeded: {job}/{scheduled_at}, {took_ms:.0f} ms after it was due", flush=True
    )


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except (FencepostError, grpc.aio.AioRpcError) as error:
        sys.exit(f"the demo jobs could not be made: {error}")

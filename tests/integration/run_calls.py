"""Calls that several tests of RunService share."""

from typing import Any

from fencepost.v1 import failure_pb2, job_pb2, run_pb2, run_service_pb2, worker_pb2
from google.protobuf.duration_pb2 import Duration

from tests.integration.run_server import RunServer, json_payload


def fence(assignment: worker_pb2.Assignment) -> dict[str, Any]:
    return {"run": assignment.run, "attempt": assignment.attempt}


async def one_of_each(server: RunServer) -> dict[str, run_pb2.Run]:
    """Runs in most of the states there are."""
    await server.make_job("mail", labels={"team": "web"})
    await server.make_job("sms", target=job_pb2.Target(kind="sms.send"))
    runs: dict[str, run_pb2.Run] = {}
    for state in ("succeeded", "dead", "retrying", "running"):
        run = await server.enqueue("mail", labels={"state": state})
        (claimed,) = (await server.claim()).runs
        assert claimed.run == run.key
        if state == "succeeded":
            await server.complete(
                claimed, success=worker_pb2.Success(result=json_payload('"done"'))
            )
        elif state == "dead":
            await server.complete(
                claimed,
                failure=failure_pb2.Failure(
                    code="BAD_ADDRESS",
                    message="no such street",
                    stack_trace="line 1",
                    retry=failure_pb2.RETRY_DIRECTIVE_NEVER,
                ),
            )
        elif state == "retrying":
            await server.complete(
                claimed,
                failure=failure_pb2.Failure(
                    code="TIMED",
                    retry=failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY,
                    retry_delay=Duration(seconds=3600),
                ),
            )
        runs[state] = run
    runs["queued"] = await server.enqueue("sms", delay=Duration(seconds=600))
    runs["cancelled"] = await server.enqueue("sms", delay=Duration(seconds=60))
    await server.runs.CancelRun(
        run_service_pb2.CancelRunRequest(name=runs["cancelled"].name, reason="enough")
    )
    return runs

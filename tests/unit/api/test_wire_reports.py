"""Plain successes are read as the general path reads them, and everything else is left to it."""

from typing import Any

import pytest
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, worker_pb2
from fencepost_server.api.wire_reports import accepted, read_completions, write_verdicts
from fencepost_server.api.wire_worker import read_completion, write_run_key, write_verdict
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.plain_reports import as_report
from fencepost_server.engine.verdicts import SUCCESS_APPLIED, Judged, Report, Verdict
from fencepost_server.errors import FencepostError

from tests.factories import JOB_ID, NOON

KEY = RunKey(JOB_ID, NOON + 412)
JSON = payload_pb2.Payload(json='{"a": 1}')


def completion(*, attempt: int = 1, **values: Any) -> worker_pb2.Completion:
    message = worker_pb2.Completion(attempt=attempt, **values)
    write_run_key(KEY, message.run)
    return message


def timings(buffered: int, handling: int) -> run_pb2.WorkerTimings:
    message = run_pb2.WorkerTimings()
    message.buffered.FromNanoseconds(buffered)
    message.handling.FromNanoseconds(handling)
    return message


PLAIN = {
    "bare": completion(success=worker_pb2.Success()),
    "result": completion(success=worker_pb2.Success(result=JSON)),
    "empty result": completion(success=worker_pb2.Success(result=payload_pb2.Payload())),
    "timings": completion(success=worker_pb2.Success(), timings=timings(1_000, 2_000_001_000)),
    "half of the timings": completion(
        success=worker_pb2.Success(),
        timings=run_pb2.WorkerTimings(handling=timings(0, 5_000).handling),
    ),
}
OTHER = {
    "later attempt": completion(attempt=2, success=worker_pb2.Success()),
    "progress": completion(success=worker_pb2.Success(), progress=run_pb2.Progress(percent=5)),
    "fine timings": completion(success=worker_pb2.Success(), timings=timings(1, 2)),
    "failure": completion(failure=failure_pb2.Failure(code="E")),
}
_AT = completion().run.scheduled_at
BAD = {
    "no outcome": completion(),
    "no attempt": completion(attempt=0, success=worker_pb2.Success()),
    "no key": worker_pb2.Completion(attempt=1, success=worker_pb2.Success()),
    "bad id": worker_pb2.Completion(
        run=run_pb2.RunKey(job_id=JOB_ID.upper(), scheduled_at=_AT),
        attempt=1,
        success=worker_pb2.Success(),
    ),
    "bad result": completion(
        success=worker_pb2.Success(result=payload_pb2.Payload(content_type="text/plain"))
    ),
    "bad timings": completion(
        success=worker_pb2.Success(),
        timings=run_pb2.WorkerTimings(handling=timings(0, -5_000).handling),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_success_says_what_the_general_path_reads(name: str) -> None:
    [read] = read_completions([PLAIN[name]])
    assert isinstance(read, tuple)
    assert as_report(read) == read_completion(PLAIN[name])


@pytest.mark.parametrize("name", OTHER)
def test_everything_else_is_read_by_the_general_path(name: str) -> None:
    [read] = read_completions([OTHER[name]])
    assert isinstance(read, Report)
    assert read == read_completion(OTHER[name])


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_gets_its_verdict_at_once(name: str) -> None:
    verdicts = worker_pb2.Verdicts()
    sent = [BAD[name], PLAIN["bare"]]
    read = read_completions(sent)
    assert isinstance(read[0], FencepostError)
    told, reports = accepted(sent, read, verdicts)
    assert (told, len(reports)) == ([PLAIN["bare"]], 1)
    [verdict] = verdicts.verdicts
    assert verdict.verdict == worker_pb2.VERDICT_INVALID
    assert verdict.run == BAD[name].run


def test_fields_of_a_later_revision_are_not_kept() -> None:
    sent = completion(success=worker_pb2.Success(), timings=timings(1_000, 2_000))
    known = sent.timings.SerializeToString()
    # Field 15, a varint.
    sent.timings.MergeFromString(b"\x78\x01")
    assert sent.timings.SerializeToString() != known
    [read] = read_completions([sent])
    assert isinstance(read, tuple)
    assert read[3] == known


def test_verdicts_are_those_of_the_general_path() -> None:
    sent = [PLAIN["bare"], OTHER["failure"], PLAIN["result"]]
    judged = [
        SUCCESS_APPLIED,
        Judged(Verdict.APPLIED, run_state=RunState.RETRYING),
        Judged(Verdict.STALE_ATTEMPT, 2, RunState.RUNNING),
    ]
    verdicts = worker_pb2.Verdicts()
    told, reports = accepted(sent, read_completions(sent), verdicts)
    write_verdicts(told, reports, judged, verdicts)
    assert list(verdicts.verdicts) == [write_verdict(KEY, 1, answer) for answer in judged]

"""`fencepost runs bulk` and `dead`: counts and asks first, begins one operation, tells its end."""

import json
from typing import Any

import pytest
from fencepost.v1 import operation_pb2, run_pb2, run_service_pb2
from fencepost_server.cli import following
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Run, ScriptedServer

OPERATION = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
NAMES = [f"tenants/default/jobs/invoice/runs/2026-12-01T0{n}:00:00Z" for n in range(6)]


def an_operation(**fields: Any) -> operation_pb2.Operation:
    values: dict[str, Any] = {
        "name": f"tenants/default/operations/{OPERATION}",
        "action": operation_pb2.OPERATION_ACTION_REPLAY,
        "state": operation_pb2.OPERATION_STATE_RUNNING,
        "rate": 50,
        "matched": 1284,
    }
    return operation_pb2.Operation(**(values | fields))


def answers(server: ScriptedServer, matched: int, **fields: Any) -> None:
    """A dry run that counts `matched`, and an operation for the call that means it."""

    def answer(request: run_service_pb2.BatchUpdateRunsRequest) -> Any:
        if request.dry_run:
            return run_service_pb2.BatchUpdateRunsResponse(matched=matched, samples=NAMES)
        return run_service_pb2.BatchUpdateRunsResponse(
            matched=matched, operation=an_operation(**fields)
        )

    server.on("BatchUpdateRuns", answer)


def test_what_matches_is_shown_and_nothing_done_without_a_yes(
    server: ScriptedServer, run: Run
) -> None:
    answers(server, 1284)
    result = run("runs", "bulk", "replay", "--filter", "kind=invoice.send")
    assert result.code == 2
    assert result.err.splitlines()[:3] == [
        "1,284 runs match",
        "  invoice/2026-12-01T00:00:00Z",
        "  invoice/2026-12-01T01:00:00Z",
    ]
    assert "  ...\n  invoice/2026-12-01T05:00:00Z\n" in result.err
    assert "will not replay 1,284 runs at 50 a second, about 26s without being asked" in result.err
    [request] = server.requests["BatchUpdateRuns"]
    assert request.dry_run


def test_a_person_may_say_yes_or_no(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(server, 3)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    said = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda *_, **__: next(said))
    refused = run("runs", "bulk", "discard", "--job", "invoice")
    assert (refused.code, "nothing was changed" in refused.err) == (1, True)
    assert run("runs", "bulk", "discard", "--job", "invoice").code == 0
    sent = server.requests["BatchUpdateRuns"]
    assert [each.dry_run for each in sent] == [True, True, False]


def test_the_flags_are_those_of_the_contract(server: ScriptedServer, run: Run) -> None:
    answers(server, 1284)
    result = run(
        *("runs", "bulk", "replay", "--job", "invoice", "--kind", "invoice.send"),
        *("--error", "SMTP", "--since", "2026-12-01T10:00:00+01:00", "--rate", "20/s"),
        *("--max", "7", "--stop-when-failing", "20%", "--newest-version"),
        *("--reason", "fixed", "--yes"),
    )
    assert (result.code, f"fencepost ops watch {OPERATION}" in result.err) == (0, True)
    preview, request = server.requests["BatchUpdateRuns"]
    assert request.parent == "tenants/default/jobs/invoice"
    assert request.filter == (
        "job=invoice AND kind=invoice.send AND last_failure.code=SMTP"
        " AND ended_at>=2026-12-01T09:00:00Z"
    )
    assert request.action == operation_pb2.OPERATION_ACTION_REPLAY
    assert (request.rate, request.max_runs, request.reason) == (20, 7, "fixed")
    assert (request.stop_when_failing, request.use_newest_version) == (0.2, True)
    assert len(request.request_id) == 36
    assert (preview.dry_run, preview.filter) == (True, request.filter)


@pytest.mark.parametrize("action", ["cancel", "discard"])
def test_a_job_alone_is_a_filter(server: ScriptedServer, run: Run, action: str) -> None:
    answers(server, 1)
    assert run("runs", "bulk", action, "--job", "invoice", "--dry-run").code == 0
    request = server.requests["BatchUpdateRuns"][0]
    assert (request.parent, request.filter) == ("tenants/default/jobs/invoice", "job=invoice")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--job", "j", "--rate", "fast"),
        ("--job", "j", "--rate", "0"),
        ("--job", "j", "--stop-when-failing", "120%"),
        ("--job", "j", "--canary", "0%"),
        ("--job", "j", "--canary", "some"),
        ("--job", "j", "--canary", "1%", "--max", "7"),
        ("--job", "j", "--since", "yesterday"),
    ],
)
def test_what_is_mistyped_asks_the_server_nothing(
    server: ScriptedServer, run: Run, flags: tuple[str, ...]
) -> None:
    result = run("runs", "bulk", "replay", *flags)
    assert (result.code, dict(server.requests)) == (2, {})
    assert "error: " in result.err


def test_a_dry_run_is_data(server: ScriptedServer, run: Run) -> None:
    answers(server, 1284)
    result = run("runs", "bulk", "replay", "--job", "invoice", "--canary", "1%", "--dry-run")
    assert result.out.splitlines()[0] == "1,284 runs match"
    assert "a canary of 13 would be replayed" in result.err
    as_json = run("runs", "bulk", "replay", "--job", "invoice", "--dry-run", "-o", "json")
    assert json.loads(as_json.out)["matched"] == "1284"
    assert all(each.dry_run for each in server.requests["BatchUpdateRuns"])


def test_nothing_that_matches_is_no_error(server: ScriptedServer, run: Run) -> None:
    answers(server, 0)
    result = run("runs", "bulk", "cancel", "--queue", "mail", "--yes")
    assert (result.code, "nothing to cancel" in result.err) == (0, True)
    assert len(server.requests["BatchUpdateRuns"]) == 1


@pytest.mark.parametrize(("dead", "code"), [(0, 0), (2, 7)])
def test_a_canary_waits_for_the_ends_and_stops(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch, dead: int, code: int
) -> None:
    monkeypatch.setattr(following, "_POLL_S", 0.001)
    answers(server, 1284)
    done = {"state": operation_pb2.OPERATION_STATE_DONE, "changed": 13}
    server.on(
        "GetOperation",
        *(
            run_service_pb2.GetOperationResponse(operation=each)
            for each in (
                an_operation(changed=4),
                an_operation(**done, changed_ended=12, changed_dead=dead),
                an_operation(**done, changed_ended=13, changed_dead=dead),
            )
        ),
    )
    result = run(
        *("runs", "bulk", "replay", "--filter", "last_failure.code=SMTP", "--canary", "1%"),
        *("--stop-when-failing", "0.2", "--reason", "it's fixed", "--yes"),
    )
    assert result.code == code
    assert server.requests["BatchUpdateRuns"][1].max_runs == 13
    assert f"13 of 1,284 runs replayed, {dead} dead again" in result.err
    assert (
        "fencepost runs bulk replay --filter last_failure.code=SMTP"
        """ --reason 'it'"'"'s fixed' --stop-when-failing 0.2""" in result.err
    )
    assert len(server.requests["GetOperation"]) == 3
    assert "changed    13" in result.out


def test_a_canary_is_at_least_one(server: ScriptedServer, run: Run) -> None:
    answers(server, 2)
    run("dead", "replay", "--job", "invoice", "--canary", "1%", "--yes", "--timeout", "0s")
    assert server.requests["BatchUpdateRuns"][1].max_runs == 1


def test_an_operation_is_followed_over_a_restart(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.cli.test_cli_steering import AWAY

    monkeypatch.setattr(following, "_POLL_S", 0.001)
    answers(server, 2, action=operation_pb2.OPERATION_ACTION_CANCEL)
    going = an_operation(action=operation_pb2.OPERATION_ACTION_CANCEL, matched=2, changed=1)
    done = an_operation(
        action=operation_pb2.OPERATION_ACTION_CANCEL,
        state=operation_pb2.OPERATION_STATE_DONE,
        matched=2,
        changed=2,
    )
    server.on(
        "GetOperation",
        run_service_pb2.GetOperationResponse(operation=going),
        lambda _: AWAY,
        run_service_pb2.GetOperationResponse(operation=done),
    )
    result = run("runs", "bulk", "cancel", "--queue", "mail", "--yes", "--watch")
    assert result.code == 0
    assert "done · 2 of 2 cancelled\n" in result.err
    assert "stops at" not in result.out


def test_dead_letters_are_listed_without_those_given_up(server: ScriptedServer, run: Run) -> None:
    kept = run_pb2.Run(name=NAMES[0], state=run_pb2.RUN_STATE_DEAD)
    gone = run_pb2.Run(
        name=NAMES[1], state=run_pb2.RUN_STATE_DEAD, discarded_at=Timestamp(seconds=1)
    )
    server.on("ListRuns", run_service_pb2.ListRunsResponse(runs=[gone, kept]))
    out = run("dead", "list", "--error", "SMTP").out
    assert [line.split()[0] for line in out.splitlines()] == ["RUN", "invoice/2026-12-01T00:00:00Z"]
    assert server.requests["ListRuns"][0].filter == "state=DEAD AND last_failure.code=SMTP"
    assert len(run("dead", "list", "--discarded").out.splitlines()) == 3


def test_dead_letters_are_grouped(server: ScriptedServer, run: Run) -> None:
    group = run_service_pb2.DeadLetterGroup(
        job="tenants/default/jobs/invoice",
        kind="invoice.send",
        failure_code="SMTP",
        dead_reason=run_pb2.DEAD_REASON_MAX_FAILURES,
        count=812,
        sample_run=NAMES[0],
        sample_message="timed\nout",
    )
    server.on(
        "ListDeadLetterGroups",
        run_service_pb2.ListDeadLetterGroupsResponse(groups=[group], grouped=900, total_groups=3),
        run_service_pb2.ListDeadLetterGroupsResponse(groups=[group]),
        run_service_pb2.ListDeadLetterGroupsResponse(),
    )
    result = run("dead", "groups", "--kind", "invoice.send", "--limit", "1")
    assert result.out.splitlines()[1].split()[:6] == [
        *("812", "invoice", "invoice.send", "SMTP", "max", "failures")
    ]
    assert "the first 1 of 3 groups" in result.err
    [request] = server.requests["ListDeadLetterGroups"]
    assert (request.filter, request.page_size) == ("kind=invoice.send", 1)
    assert json.loads(run("dead", "groups", "-o", "json").out)["groups"][0]["count"] == "812"
    assert "no dead letters" in run("dead", "groups").err

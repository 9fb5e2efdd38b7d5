"""Resource names and run keys have one spelling each; others are refused with the field."""

import pytest
from fencepost_server.clock import SECOND
from fencepost_server.domain import names
from fencepost_server.errors import InvalidField

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
AT = 1_796_115_600 * SECOND  # 2026-12-01T09:00:00Z


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (AT, f"{JOB_ID}/2026-12-01T09:00:00Z"),
        (AT + 412, f"{JOB_ID}/2026-12-01T09:00:00.000412Z"),
        (AT + 500_000, f"{JOB_ID}/2026-12-01T09:00:00.500000Z"),
    ],
)
def test_run_keys_have_the_text_of_the_protocol(at: int, text: str) -> None:
    assert names.format_run_key(JOB_ID, at) == text
    assert names.parse_run_key(text, field="key") == (JOB_ID, at)


@pytest.mark.parametrize(
    "instant",
    [
        "2026-12-01T09:00:00.5Z",
        "2026-12-01T09:00:00.000000Z",
        "2026-12-01T09:00:00.0004121Z",
        "2026-12-01T09:00:00+00:00",
        "2026-12-01t09:00:00z",
        "2026-13-01T09:00:00Z",
        "2026-12-01T24:00:00Z",
        "2026-12-01T09:00:60Z",
        "0000-12-01T09:00:00Z",
        "２０26-12-01T09:00:00Z",
        " 2026-12-01T09:00:00Z",
        "",
    ],
)
def test_other_spellings_of_an_instant_are_refused(instant: str) -> None:
    with pytest.raises(InvalidField) as caught:
        names.parse_run(f"tenants/acme/jobs/a/runs/{instant}", field="name")
    assert caught.value.field == "name"
    assert "name: got" in caught.value.message


def test_names_are_read_and_written() -> None:
    assert names.parse_tenant("tenants/acme", field="f") == "acme"
    queue = names.parse_queue("tenants/acme/queues/my.queue_1", field="f")
    assert (queue.tenant, queue.queue_name) == ("acme", "my.queue_1")
    assert str(queue) == "tenants/acme/queues/my.queue_1"
    job = names.parse_job("tenants/acme/jobs/nightly", field="f")
    assert (job.job, job.is_id, str(job)) == ("nightly", False, "tenants/acme/jobs/nightly")
    assert names.parse_job(f"tenants/acme/jobs/{JOB_ID}", field="f").is_id
    run = names.parse_run(f"tenants/acme/jobs/{JOB_ID}/runs/2026-12-01T09:00:00Z", field="f")
    assert (run.is_id, run.scheduled_at) == (True, AT)
    assert str(run) == f"tenants/acme/jobs/{JOB_ID}/runs/2026-12-01T09:00:00Z"
    assert names.parse_worker(f"workers/{JOB_ID}", field="f") == JOB_ID


@pytest.mark.parametrize(
    "name",
    [
        "",
        "acme",
        "tenants/",
        "tenants/Acme",
        "tenants/1acme",
        "tenants/a_b",
        "tenants/acme/",
        "tenants/acme/jobs",
        "tenant/acme",
        "tenants/" + "a" * 64,
        "tenants/acme\n",
        "tenants/äcme",
    ],
)
def test_malformed_tenants_are_refused(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        names.parse_tenant(name, field="parent")
    assert caught.value.message.startswith("parent: ")
    assert "tenants/{tenant}" in caught.value.message


@pytest.mark.parametrize("name", ["", "-a", ".a", "A", "a" * 64, "a b", "a/b", "a\n", JOB_ID])
def test_job_names_that_nobody_may_choose(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        names.check_job_name(name, field="job_name")
    assert names.JOB_RULE in caught.value.message
    assert caught.value.metadata["value"] == name


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b_c-d", JOB_ID[:-1], JOB_ID + "0"])
def test_job_names_that_people_choose(name: str) -> None:
    assert names.check_job_name(name, field="job_name") == name


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidField) as caught:
        names.parse_job("x" * 100_000, field="name")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ["workers/x", JOB_ID, f"workers/{JOB_ID.upper()}", "workers/"])
def test_malformed_workers_are_refused(name: str) -> None:
    with pytest.raises(InvalidField):
        names.parse_worker(name, field="name")

"""Concurrency keys made from labels and payloads of runs."""

import json

import pytest
from fencepost.v1 import job_pb2, payload_pb2
from fencepost_server.policy.concurrency_key import template_problem

from tests.integration.definition_server import refusal
from tests.integration.run_server import json_payload, serving
from tests.integration.world import World

_LABELS = {"customer": "c7", "region": "eu"}
_BODY = json.dumps(
    {"order": {"id": 17, "lines": [{"sku": "x-1"}], "paid": True, "none": None, "gross": 1e5}}
)


def _stored(text: str, *, encoding: str = "") -> bytes:
    return payload_pb2.Payload(json=text, encoding=encoding).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("template", "payload", "key"),
    [
        ("plain", None, "plain"),
        ("customer-{label.customer}", None, "customer-c7"),
        ("{label.region}/{label.customer}", None, "eu/c7"),
        ("{label.missing}", None, None),
        ("x{label.missing}", None, None),
        ("{{{label.customer}}}", None, "{c7}"),
        ("order-{payload.order.id}", _stored(_BODY), "order-17"),
        ("{payload.order.lines.0.sku}", _stored(_BODY), "x-1"),
        ("{payload.order.paid}", _stored(_BODY), "true"),
        ("{payload.order.gross}", _stored(_BODY), "100000.0"),
        ("{payload.order.none}", _stored(_BODY), None),
        ("{payload.order.lines}", _stored(_BODY), None),
        ("{payload.order}", _stored(_BODY), None),
        ("{payload.order.lines.9.sku}", _stored(_BODY), None),
        ("{payload.a}", None, None),
        ("{payload.a}", _stored("not json"), None),
        ("{payload.a}", _stored('{"a": "\\u0000"}'), None),
        ("{payload.a}", _stored('{"a": "' + "ü" * 200 + '"}'), "hash"),
        ("{payload.a}", _stored('{"a": ""}'), None),
        ("{payload.a}", _stored('{"a": "k"}', encoding="gzip"), None),
        ("{payload.a}", _stored('{"b": "' + "x" * 70_000 + '", "a": "far"}'), "far"),
        ("{payload.a}", _stored("[" * 100_000), None),
        (
            "{payload.a}",
            payload_pb2.Payload(data=b'{"a": 1}', content_type="x").SerializeToString(),
            None,
        ),
        ("{payload.a}", b"\x0a\xff\xff\xff", None),
        ("{payload.a}", b"\x0a\x02\xff\xfe", None),
    ],
)
async def test_a_key_is_made_from_what_the_run_has(
    world: World, template: str, payload: bytes | None, key: str | None
) -> None:
    assert template_problem(template) is None
    made = await world.value(
        "SELECT fencepost.run_concurrency_key($1, $2::jsonb, $3)",
        template,
        json.dumps(_LABELS),
        payload,
    )
    if key == "hash":
        assert len(made) == 64
    else:
        assert made == key


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{label}", "'{label}' at character 1"),
        ("a-{name.x}", "'{name.x}' at character 3"),
        ("a-{label.x", "'{label.x' at character 3"),
        ("a}", "'}' at character 2"),
        ("{payload.a..b}", "'{payload.a..b}' at character 1 has an empty name"),
        ("{payload.}", "'{payload.}' at character 1"),
    ],
)
async def test_a_template_that_is_wrong_is_refused_with_its_place(
    database_url: str, template: str, said: str
) -> None:
    assert said in str(template_problem(template))
    async with serving(database_url) as server:
        seen = await refusal(
            server.make_job("mail", limits=job_pb2.RunLimits(concurrency_key=template))
        )
        assert (seen.reason, seen.fields) == ("INVALID_FIELD", ["job.limits.concurrency_key"])
        assert not await server.query("SELECT 1 FROM fencepost.jobs")


async def test_fires_get_the_key_of_their_job(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job(
            "mail",
            labels=_LABELS,
            payload=json_payload(_BODY),
            limits=job_pb2.RunLimits(concurrency_key="{label.customer}-{payload.order.id}"),
        )
        [row] = await server.query("SELECT * FROM fencepost.job_schedules")
        assert row["concurrency_key"] == "c7-17"
        assert row["concurrency_template"] == "{label.customer}-{payload.order.id}"


async def test_enqueued_runs_get_keys_of_their_own(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job(
            "mail",
            labels={"customer": "nobody"},
            payload=json_payload('{"order": 1}'),
            limits=job_pb2.RunLimits(concurrency_key="{label.customer}-{payload.order}"),
        )
        for values, key in (
            ({}, "nobody-1"),
            ({"labels": {"customer": "c1"}}, "c1-1"),
            ({"payload": json_payload('{"order": 2}')}, "nobody-2"),
            ({"labels": {"customer": "c2"}, "payload": json_payload('{"order": 3}')}, "c2-3"),
            ({"payload": json_payload("{}")}, ""),
            ({"concurrency_key": "{mine}"}, "{mine}"),
            ({"concurrency_key": ""}, ""),
        ):
            run = await server.enqueue("mail", **values)
            assert run.concurrency_key == key
            assert (await server.get(run)).concurrency_key == key

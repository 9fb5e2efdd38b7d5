"""The filter grammar: what parses to which conditions, and how the rest is refused."""

import pytest
from fencepost_server.api.filters import (
    FILTER_BYTES_MAX,
    INSTANT,
    INTEGER,
    LABELS,
    PREFIX_TEXT,
    TEXT,
    Condition,
    Op,
    enum_names,
    parse,
)
from fencepost_server.clock import SECOND
from fencepost_server.errors import FilterNotSupported
from hypothesis import given
from hypothesis import strategies as st

FIELDS = {
    "kind": PREFIX_TEXT,
    "queue": TEXT,
    "state": enum_names({"ACTIVE": 1, "PAUSED": 2}),
    "created_at": INSTANT,
    "attempt": INTEGER,
    "labels": LABELS,
    "sdk.name": TEXT,
}


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("", []),
        ("   ", []),
        ("queue:a", [Condition(field="queue", op=Op.EQ, values=("a",))]),
        ("queue = a", [Condition(field="queue", op=Op.EQ, values=("a",))]),
        ('queue="a b"', [Condition(field="queue", op=Op.EQ, values=("a b",))]),
        (r'queue="a\"b\\"', [Condition(field="queue", op=Op.EQ, values=('a"b\\',))]),
        ('queue=""', [Condition(field="queue", op=Op.EQ, values=("",))]),
        ("queue!=a,b", [Condition(field="queue", op=Op.NE, values=("a", "b"))]),
        ("queue:(a OR b)", [Condition(field="queue", op=Op.EQ, values=("a", "b"))]),
        ("queue:( a  OR  b )", [Condition(field="queue", op=Op.EQ, values=("a", "b"))]),
        ("state:ACTIVE,PAUSED", [Condition(field="state", op=Op.EQ, values=(1, 2))]),
        ("kind:a.*", [Condition(field="kind", op=Op.EQ, prefixes=("a.",))]),
        (
            "kind:a.*,b",
            [Condition(field="kind", op=Op.EQ, values=("b",), prefixes=("a.",))],
        ),
        ('kind:"a*"', [Condition(field="kind", op=Op.EQ, values=("a*",))]),
        ("sdk.name=go", [Condition(field="sdk.name", op=Op.EQ, values=("go",))]),
        ("attempt>=3", [Condition(field="attempt", op=Op.GE, values=(3,))]),
        (
            "created_at<1970-01-01T00:00:01.5Z",
            [Condition(field="created_at", op=Op.LT, values=(SECOND * 3 // 2,))],
        ),
        (
            "created_at>=1970-01-01T01:00:01+01:00",
            [Condition(field="created_at", op=Op.GE, values=(SECOND,))],
        ),
        ("labels:env", [Condition(field="labels", op=Op.HAS_KEY, key="env")]),
        ("labels.env:*", [Condition(field="labels", op=Op.HAS_KEY, key="env")]),
        ("labels.env:prod", [Condition(field="labels", op=Op.EQ, key="env", values=("prod",))]),
        (
            'labels."a b":1',
            [Condition(field="labels", op=Op.EQ, key="a b", values=("1",))],
        ),
        (
            "labels.a/b.c-d!=1,2",
            [Condition(field="labels", op=Op.NE, key="a/b.c-d", values=("1", "2"))],
        ),
        (
            "queue:a AND kind:b state:ACTIVE",
            [
                Condition(field="queue", op=Op.EQ, values=("a",)),
                Condition(field="kind", op=Op.EQ, values=("b",)),
                Condition(field="state", op=Op.EQ, values=(1,)),
            ],
        ),
    ],
)
def test_filters_parse(text: str, conditions: list[Condition]) -> None:
    assert parse(text, FIELDS) == conditions


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nope:1", "no field 'nope'; known: attempt, created_at"),
        ("queue.x:1", "no field 'queue.x'"),
        ("queue", "one of = != < <= > >= : at character 6, found the end"),
        ("queue:", "a value at character 7"),
        (":a", "a field name at character 1"),
        ("queue:a OR queue:b", "has OR at character 9: conditions are joined by blanks or AND"),
        ("queue:(a", "OR or a closing parenthesis"),
        ("queue:(a b)", "OR or a closing parenthesis"),
        ("queue:(a OR b)kind:c", "a blank between conditions"),
        ('queue:"a', "a value at character 7"),
        ("queue>a", "cannot order queue"),
        ("state:DEAD", "'DEAD' for state; known: ACTIVE, PAUSED"),
        ("queue:a*", "no prefix for queue"),
        ("created_at>yesterday", "RFC 3339"),
        ("created_at>2026-13-01T00:00:00Z", "RFC 3339"),
        ("created_at>2026-12-01T00:00:00", "RFC 3339"),
        ("created_at>2026-12-01T00:00:00.1234567Z", "RFC 3339"),
        ("created_at>2026-12-01T00:00:00Z,2026-12-02T00:00:00Z", "one value for created_at>"),
        ("attempt=x", "a whole number"),
        ("labels=x", "labels:KEY"),
        ("labels.a>x", "cannot order labels"),
        ("NOT queue:a", "has NOT at character 1"),
        ("queue:a AND", "has AND at character 9"),
        ("queue:a\x00b", "a NUL character"),
        ("queue:a " * 33, "more than 32 conditions"),
        ("queue:" + ",".join("a" * 101), "more than 100 values"),
        ("queue:" + "a" * FILTER_BYTES_MAX, "longer than 2048 bytes"),
    ],
)
def test_what_the_grammar_or_the_list_does_not_know_is_refused(text: str, part: str) -> None:
    with pytest.raises(FilterNotSupported) as caught:
        parse(text, FIELDS)
    assert part in caught.value.message
    assert caught.value.field == "filter"


def test_the_refusal_names_the_field() -> None:
    with pytest.raises(FilterNotSupported) as caught:
        parse("colour:red", FIELDS)
    assert caught.value.metadata["filterField"] == "colour"


ANY_TEXT = st.text(max_size=200) | st.text(
    alphabet='abq:=!<>,()"* \\.OR\x00labelskindstate', max_size=60
)


@given(ANY_TEXT)
def test_any_text_parses_or_is_refused(text: str) -> None:
    conditions, refusal = [], ""
    try:
        conditions = parse(text, FIELDS)
    except FilterNotSupported as error:
        refusal = error.message
    assert refusal == "" or refusal.startswith("filter: ")
    assert all(condition.field in FIELDS for condition in conditions)

"""`fencepost explain`: what a cron expression does, without a server."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.choices import DstFold, DstGap
from fencepost_server.cli.explain_document import document, time_of_day
from fencepost_server.cli.failure import usage
from fencepost_server.cli.settings import Given, OutputFormat, OutputOption, resolve
from fencepost_server.cli.values import parse_instant

if TYPE_CHECKING:
    from fencepost_server.cli.explain_more import Comparison
    from fencepost_server.policy.cron import Planned
    from fencepost_server.policy.explain import ClockChange, Explanation, Gap, Gaps

FIRES_MAX = 1000
_DAY_S = 86_400


def explain(
    context: typer.Context,
    expressions: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPR",
            help="Cron expressions, each quoted; several are a union.",
            show_default=False,
        ),
    ],
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="IANA time zone.")] = "UTC",
    gap: Annotated[
        DstGap, typer.Option(help="What to do with a local time that does not exist.")
    ] = DstGap.RUN_AFTER_GAP,
    fold: Annotated[
        DstFold, typer.Option(help="What to do with a local time that comes twice.")
    ] = DstFold.FIRST,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            max=FIRES_MAX,
            help="How many fires to show; else 5, or all with --until.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", "--from", metavar="INSTANT", help="As seen at this instant; else now."
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help=f"Fires before it, at most {FIRES_MAX}."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="EXPR", help="Another expression to set beside; several are a union."),
    ] = None,
    ics: Annotated[
        bool, typer.Option("--ics", help="Print the fires as iCalendar text, nothing else.")
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The job whose name decides what H is; see --tenant."),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="The job's tenant.", show_default=False),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Say in words when a cron expression fires, and what clock changes do to it.

    Examples:

      fencepost explain '0 9 * * 1-5' --tz Europe/Berlin

      fencepost explain '30 2 * * *' --tz America/New_York --gap skip --fold both

      fencepost explain 'H H * * *' --job invoice.send -n 10 -o json

      fencepost explain '0 9 * * *' --compare '0 9 * * 1-5' --until 2027-01-01T00:00:00Z
    """
    from fencepost_server.cli.explain_more import calendar
    from fencepost_server.cli.explain_more import compare as compared
    from fencepost_server.clock import SECOND, from_datetime
    from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy
    from fencepost_server.policy.explain import explain as explained
    from fencepost_server.policy.schedule import cron_rule

    before = context.obj if isinstance(context.obj, Given) else Given()
    settings = resolve(before, Given(tenant=tenant, output=output))
    now = int(time.time()) * SECOND if at is None else from_datetime(parse_instant("--at", at))
    spec = CronSpec(
        expressions=tuple(expressions),
        time_zone=tz,
        dst_gap=DstGapPolicy[gap.name],
        dst_fold=DstFoldPolicy[fold.name],
    )
    seed = f"{settings.tenant}/{job}" if job is not None else ""
    end = None if until is None else from_datetime(parse_instant("--until", until))
    if end is not None and end <= now:
        raise usage(
            f"--until {until} is not after the instant that is looked from",
            why="fires are shown from --from, or now, up to --until",
            hint="name a later instant",
        )
    count = count or (5 if end is None else FIRES_MAX)
    with _spoken_refusal(expressions, tz):
        found = explained(spec, now=now, count=count, seed=seed)
    if end is not None:
        found = replace(found, fires=[one for one in found.fires if one.at < end])
    beside = None
    if compare:
        with _spoken_refusal(compare, tz):
            other = cron_rule(replace(spec, expressions=tuple(compare)), seed=seed)
        beside = compared(found.rule, other, now=now, until=end)
    hashed = [one.text for one in found.rule.fields] if _is_hashed(expressions, spec) else []
    if ics:
        print(calendar(found.fires, summary=job or " ".join(expressions), seed=seed), end="")
    elif settings.output is OutputFormat.JSON:
        print(json.dumps(document(found, hashed, beside), indent=2, ensure_ascii=False))
    else:
        _print(found, now, hashed, named=job is not None)
        if beside is not None:
            _line("beside", _comparison_lines(found, beside))


@contextmanager
def _spoken_refusal(expressions: list[str], tz: str) -> Iterator[None]:
    from fencepost_server.errors import InvalidSchedule

    try:
        yield
    except InvalidSchedule as error:
        raise usage(
            f"{' and '.join(map(repr, expressions))} in {tz} is not a schedule",
            why=error.message,
            hint="the grammar is in docs/time.md; for example: fencepost explain '0 9 * * 1-5'",
        ) from error


def _is_hashed(expressions: list[str], spec: Any) -> bool:
    """Whether another job would get other values: H stands in the text."""
    from fencepost_server.policy.schedule import interned_spec

    seeds = ("a/a", "b/b", "c/c", "d/d")
    return len({interned_spec(spec, seed=seed) for seed in seeds}) > 1


def _print(found: "Explanation", now: int, hashed: list[str], *, named: bool) -> None:
    print(found.description)
    if hashed:
        drawn = "for this job" if named else "for a job without a name; name it with --job NAME"
        _line("hash", [f"H stands for {text!r} {drawn}" for text in hashed])
    print()
    _line("next", [_fire_words(found, one, now) for one in found.fires] or ["it does not fire"])
    print()
    _line("gaps", _gap_lines(found, found.gaps))
    notes = [line for change in found.changes for line in _change_lines(found, change)]
    _line("dst", notes or ["no clock change within two years"])
    moves = [text for change in found.changes if (text := _utc_words(found, change))]
    _line("utc", moves)
    _line("warning", list(found.warnings))


def _line(name: str, texts: list[str]) -> None:
    for number, text in enumerate(texts):
        print(f"  {name if number == 0 else '':<8}{text}")


def _fire_words(found: "Explanation", one: "Planned", now: int) -> str:
    utc = _utc(one.at)
    if one.skip_reason is None:
        words = f"{_local(found, one.at)}   {utc}"
    else:
        words = f"{_spoken(one.local_time)}   does not fire"
    if one is found.fires[0] and one.skip_reason is None:
        words += f"   in {_length(one.at - now)}"
    return f"{words}   ({one.note.rstrip('.')})" if one.note else words


def _gap_lines(found: "Explanation", gaps: "Gaps") -> list[str]:
    if gaps.smallest is None or gaps.largest is None:
        return ["none: fewer than two fires"]
    until = f"seen until {_local(found, gaps.until)}"
    if gaps.smallest.length == gaps.largest.length:
        lines = [f"always {_length(gaps.smallest.length)} ({until})"]
    else:
        lines = [
            f"smallest {_length(gaps.smallest.length)}, from {_span(found, gaps.smallest)}",
            f"largest {_length(gaps.largest.length)}, from {_span(found, gaps.largest)} ({until})",
        ]
    return lines + [
        f"{_length(gap.length)} across a clock change, from {_span(found, gap)}"
        for gap in gaps.changed
    ]


def _span(found: "Explanation", gap: "Gap") -> str:
    return f"{_local(found, gap.after)} to {_local(found, gap.until)}"


def _change_lines(found: "Explanation", change: "ClockChange") -> list[str]:
    forward = change.offset > change.offset_before
    size = _length(abs(change.offset - change.offset_before) * 1_000_000)
    start = f"{_local(found, change.at)}: clocks go {'forward' if forward else 'back'} by {size}; "
    if not change.notes:
        if found.elapsed:
            return [
                f"{start}the rule runs on elapsed time, so what is skipped does not fire"
                if forward
                else f"{start}the rule runs on elapsed time, so what is repeated fires twice"
            ]
        return [f"{start}no fire falls into {'what is skipped' if forward else 'what is repeated'}"]
    lines = [f"! {start.rstrip('; ')}"]
    lines += [f"    {note.note}" for note in change.notes]
    if change.more:
        lines.append(f"    and {change.more} more like it")
    return lines


def _utc_words(found: "Explanation", change: "ClockChange") -> str:
    if change.first_fire is None or found.elapsed:
        return ""
    local = _local(found, change.first_fire)
    return (
        f"from {local} the same wall time is {time_of_day(change.utc_after)}Z, "
        f"no longer {time_of_day(change.utc_before)}Z"
    )


def _comparison_lines(found: "Explanation", beside: "Comparison") -> list[str]:
    from fencepost_server.cli.explain_more import NAMED_MAX

    other = " and ".join(repr(fields.text) for fields in beside.other.fields)
    lines = [
        f"{other}, until {_local(found, beside.until)}: {len(beside.both)} fires of both, "
        f"{len(beside.only_here)} of the first alone, {len(beside.only_there)} of the other alone"
    ]
    for words, instants in (("first", beside.only_here), ("other", beside.only_there)):
        lines += [
            f"{words} alone   {_local(found, at)}   {_utc(at)}" for at in instants[:NAMED_MAX]
        ]
        if len(instants) > NAMED_MAX:
            lines.append(f"{words} alone   and {len(instants) - NAMED_MAX} more")
    return lines


def _local(found: "Explanation", at: int) -> str:
    return _spoken(found.rule.local_time(at))


def _spoken(local_time: str) -> str:
    """Such as Tue 2026-12-01 09:00 +01:00; seconds only where there are some."""
    at = datetime.fromisoformat(local_time)
    offset = local_time[19:].replace("Z", "+00:00")
    form = "%a %Y-%m-%d %H:%M:%S" if at.second else "%a %Y-%m-%d %H:%M"
    return f"{at.strftime(form)} {offset}".rstrip()


def _utc(at: int) -> str:
    """Such as 08:00Z; a fire is a whole second."""
    return f"{time_of_day(at // 1_000_000 % _DAY_S)}Z"


def _length(micros: int) -> str:
    """Such as 45s, 23h 30m, 72h or 455d 12h; days only from the fifth on."""
    rest = timedelta(microseconds=micros)
    days = rest.days if rest >= timedelta(days=5) else 0
    hours, seconds = divmod(int((rest - timedelta(days=days)).total_seconds()), 3600)
    minutes, seconds = divmod(seconds, 60)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
    return " ".join(f"{number}{unit}" for number, unit in parts if number) or "0s"

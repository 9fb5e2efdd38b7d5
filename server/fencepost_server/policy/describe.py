"""Says in English what a schedule does, and what a careful reader would ask about.

For PreviewSchedule and the command line; nothing is decided by these words.
"""

import re
from dataclasses import replace

from fencepost_server.clock import DAY, SECOND, Duration, Instant, format_instant
from fencepost_server.domain.schedule import CronSpec, IntervalSpec, OnceSpec, Schedule
from fencepost_server.policy.cron import CronRule
from fencepost_server.policy.cron_calendar import CronFields
from fencepost_server.policy.cron_fields import FIELDS, FieldKind
from fencepost_server.policy.cron_fields import SECOND as SECOND_FIELD
from fencepost_server.policy.schedule import cron_rule

DESCRIPTION_BYTES_MAX = 1024
WARNINGS_MAX = 16
_LOOK_AHEAD = 366 * DAY
# More times of day than this are told as a pattern, not one by one.
_TIMES_MAX = 6

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_ORDINALS = {1: "first", 2: "second", 3: "third", 4: "fourth", 5: "fifth"}


def describe(schedule: Schedule, *, seed: str = "") -> str:
    """The schedule in English words, at most 1 KiB; `seed` decides what `H` is.

    Raises InvalidSchedule for a cron expression that is none.
    """
    match schedule.spec:
        case CronSpec() as spec:
            rule = cron_rule(spec, seed=seed)
            words = "; and ".join(_expression_words(one.text) for one in rule.fields)
            text = f"{words}, in the time zone {rule.zone.name}"
        case IntervalSpec() as spec:
            text = f"every {_duration_words(spec.every)}"
            if spec.anchor is not None:
                text += f", counted from {format_instant(spec.anchor)}"
            if spec.after_completion:
                text = f"{_duration_words(spec.every)} after the end of each run"
                if spec.anchor is not None:
                    text += f", the first at {format_instant(spec.anchor)}"
        case OnceSpec() as spec:
            text = f"once, at {format_instant(spec.at)}"
    if schedule.start_at is not None:
        text += f", not before {format_instant(schedule.start_at)}"
    if schedule.end_at is not None:
        text += f", ending before {format_instant(schedule.end_at)}"
    if schedule.max_fires:
        text += f", at most {_count(schedule.max_fires, 'time')}"
    if schedule.jitter:
        text += f", each run up to {_duration_words(schedule.jitter)} later"
    if schedule.exclude_calendars:
        text += f", except in {', '.join(schedule.exclude_calendars)}"
    text = f"{text[0].upper()}{text[1:]}."
    encoded = text.encode()
    if len(encoded) <= DESCRIPTION_BYTES_MAX:
        return text
    return encoded[: DESCRIPTION_BYTES_MAX - 3].decode(errors="ignore") + "…"


def warnings(schedule: Schedule, *, now: Instant, seed: str = "") -> list[str]:
    """At most 16 sentences: day fields that meet, uneven steps, clock changes within a year.

    Raises InvalidSchedule for a cron expression that is none.
    """
    if not isinstance(schedule.spec, CronSpec):
        return []
    found: list[str] = []
    for fields in cron_rule(schedule.spec, seed=seed).fields:
        alone = cron_rule(replace(schedule.spec, expressions=(fields.text,)))
        found += _day_warnings(fields)
        found += _step_warnings(fields.text)
        found += _clock_warnings(alone, fields.text, now)
    return list(dict.fromkeys(found))[:WARNINGS_MAX]


def _day_warnings(fields: CronFields) -> list[str]:
    day, _, weekday = fields.text.split(" ")[-3:]
    if fields.days_restrict and fields.weekdays_restrict:
        return [
            f'"{fields.text}": both day fields are restricted, so it fires on a day that '
            f"matches either: {_day_words(day)}, or {_weekday_words(weekday)}."
        ]
    if day != "*" and weekday != "*":
        return [
            f'"{fields.text}": a day field begins with *, so it fires only on a day that '
            f"matches both: {_day_words(day)}, and {_weekday_words(weekday)}."
        ]
    return []


def _step_warnings(text: str) -> list[str]:
    found = []
    for kind, value in _named_fields(text):
        for part in value.split(","):
            base, slash, step_text = part.partition("/")
            if not slash:
                continue
            top = kind.low + kind.size - 1
            low, high = (
                (kind.low, top) if base == "*" else tuple(int(end) for end in base.split("-"))
            )
            step = int(step_text)
            # Only a step round the whole field is meant to be even.
            if low - kind.low >= step or high < top:
                continue
            count = (high - low) // step + 1
            if count * step != kind.size:
                found.append(
                    f'"{text}": the step {step} does not divide the {kind.size} values of '
                    f"the {kind.name} evenly: it starts again at {low}."
                )
    return found


def _clock_warnings(rule: CronRule, text: str, now: Instant) -> list[str]:
    found: list[str] = []
    second = now // SECOND
    for change in rule.zone.changes(second, second + _LOOK_AHEAD // SECOND):
        # A doubled time begins before the change by as much as clocks go back.
        begin = change.start - max(change.offset_before - change.offset, 0)
        found += [
            f'"{text}" in {rule.zone.name}: {fire.note}'
            for fire in rule.planned(begin * SECOND - 1, 1)
            if fire.note and fire.at <= change.start * SECOND
        ]
    return found


def _named_fields(text: str) -> list[tuple[FieldKind, str]]:
    values = text.split(" ")
    kinds = FIELDS if len(values) == len(FIELDS) else (SECOND_FIELD, *FIELDS)
    return list(zip(kinds, values, strict=True))


def _expression_words(text: str) -> str:
    values = text.split(" ")
    second = values[0] if len(values) > len(FIELDS) else "0"
    minute, hour, day, month, weekday = values[-5:]
    words = [_time_words(second, minute, hour)]
    if day != "*" and weekday != "*":
        either = not (day.startswith("*") or weekday.startswith("*"))
        joint = "or" if either else "if that is also"
        words.append(f"{_day_words(day)} {joint} {_weekday_words(weekday)}")
    elif day != "*":
        words.append(_day_words(day))
    elif weekday != "*":
        words.append(_weekday_words(weekday))
    if month != "*":
        words.append(f"in {_list_words(month, 'month', _MONTHS, 1)}")
    return ", ".join(words)


def _time_words(second: str, minute: str, hour: str) -> str:
    times = _times_of_day(second, minute, hour)
    if times:
        return f"at {_and(times)}"
    words = []
    if second != "0":
        words.append(_unit_words(second, "second"))
    # "every second of every minute" says no more than "every second".
    if minute != "*" or not second.startswith("*"):
        words.append(_unit_words(minute, "minute"))
    if hour == "*":
        if not minute.startswith("*"):
            words.append("of every hour")
    elif hour.startswith("*/"):
        words.append(f"of {_unit_words(hour, 'hour')}")
    else:
        words.append(
            f"of {'hours' if re.search('[,-]', hour) else 'hour'} {_list_words(hour, 'hour')}"
        )
    return " ".join(words)


def _times_of_day(second: str, minute: str, hour: str) -> list[str]:
    """The times one by one, if they are few and plainly listed; else nothing."""
    lists = [value.split(",") for value in (hour, minute, second)]
    plain = all(part.isdigit() for parts in lists for part in parts)
    if not plain or len(lists[0]) * len(lists[1]) * len(lists[2]) > _TIMES_MAX:
        return []
    hours, minutes, seconds = (sorted({int(part) for part in parts}) for parts in lists)
    return [
        f"{h:02d}:{m:02d}" + (f":{s:02d}" if seconds != [0] else "")
        for h in hours
        for m in minutes
        for s in seconds
    ]


def _unit_words(value: str, unit: str) -> str:
    if value == "*":
        return f"every {unit}"
    if value.startswith("*/") and "," not in value:
        step = int(value[2:])
        size = 24 if unit == "hour" else 60
        even = f"every {step} {unit}s"
        return even if size % step == 0 else f"{even} from {unit} 0"
    return f"at {unit}{'s' if re.search('[,-]', value) else ''} {_list_words(value, unit)}"


def _day_words(value: str) -> str:
    parts = value.split(",")
    plain = [part for part in parts if not re.search("[LW]", part)]
    words = []
    if plain and plain[0].startswith("*"):
        words.append(f"{_list_words(','.join(plain), 'day')} from day 1 of the month")
    elif plain:
        several = "s" if re.search("[,-]", ",".join(plain)) else ""
        words.append(f"day{several} {_list_words(','.join(plain), 'day')} of the month")
    for part in parts:
        if part == "L":
            words.append("the last day of the month")
        elif part == "LW":
            words.append("the last weekday of the month")
        elif part.startswith("L-"):
            words.append(f"{_count(int(part[2:]), 'day')} before the last day of the month")
        elif part.endswith("W"):
            words.append(f"the weekday nearest day {part[:-1]}")
    return f"on {_and(words)}"


def _weekday_words(value: str) -> str:
    words = []
    for part in value.split(","):
        if part.endswith("L"):
            words.append(f"the last {_WEEKDAYS[int(part[:-1])]} of the month")
        elif "#" in part:
            weekday, _, nth = part.partition("#")
            words.append(f"the {_ORDINALS[int(nth)]} {_WEEKDAYS[int(weekday)]} of the month")
        else:
            words.append(_part_words(part, "day", _WEEKDAYS))
    return f"on {_and(words)}"


def _list_words(value: str, unit: str, names: tuple[str, ...] = (), low: int = 0) -> str:
    return _and([_part_words(part, unit, names, low) for part in value.split(",")])


def _part_words(part: str, unit: str, names: tuple[str, ...] = (), low: int = 0) -> str:
    """A value, a range or a range with a step, named where values have names."""
    base, _, step = part.partition("/")
    if base == "*":
        start = f" from {names[0]}" if names and step else ""
        return f"every {step} {unit}s{start}" if step else f"every {unit}"
    ends = [names[int(end) - low] if names else end for end in base.split("-")]
    text = " to ".join(ends)
    return f"{text} in steps of {step}" if step else text


def _duration_words(duration: Duration) -> str:
    rest = duration // SECOND
    words = []
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        count, rest = divmod(rest, size)
        if count:
            words.append(_count(count, unit))
    return " ".join(words)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

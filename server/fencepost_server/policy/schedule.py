"""When a schedule fires, whatever its kind, and whether it is acceptable at all.

The API validates and asks for the first fire; the engine asks for the next one, once per
distinct (rule, instant), of compiled rules that are cached here.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias

from fencepost_server.clock import DAY, SECOND, Duration, Instant, ceil_second
from fencepost_server.domain.schedule import (
    CronSpec,
    IntervalSpec,
    MisfirePolicy,
    OnceSpec,
    Schedule,
    Spec,
)
from fencepost_server.errors import FencepostError, InvalidField, InvalidSchedule
from fencepost_server.policy.cron import CronRule, compile_cron

EVERY_MIN, EVERY_MAX = SECOND, 366 * DAY
ONCE_AHEAD_MAX = 366 * DAY
THRESHOLD_MIN, THRESHOLD_MAX = SECOND, DAY
WINDOW_MIN = SECOND
JITTER_MAX = DAY
CALENDARS_MAX = 8
CATCH_UP_MAX = 1000
FIRES_MAX = 2**63 - 1
RULES_CACHED = 4096

_HASHED = re.compile(r"(?<![A-Z@])H(?![A-Z])", re.IGNORECASE)


class Rule(Protocol):
    """Answers where the fires of a schedule lie: whole seconds, strictly increasing."""

    def next_after(self, at: Instant) -> Instant | None:
        """The first fire strictly later than `at`; None if there is none."""
        ...

    def prev_before(self, at: Instant) -> Instant | None:
        """The last fire strictly earlier than `at`; None if there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRule:
    """Fires at anchor + n × every, n from 0."""

    every: Duration
    anchor: Instant

    def next_after(self, at: Instant) -> Instant | None:
        """The first fire strictly later than `at`."""
        passed = (at - self.anchor) // self.every + 1
        return self.anchor + max(passed, 0) * self.every

    def prev_before(self, at: Instant) -> Instant | None:
        """The last fire strictly earlier than `at`; None before the anchor."""
        passed = -((self.anchor - at) // self.every) - 1
        return None if passed < 0 else self.anchor + passed * self.every


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceRule:
    """Fires once."""

    at: Instant

    def next_after(self, at: Instant) -> Instant | None:
        """The fire, if it is strictly later than `at`."""
        return self.at if self.at > at else None

    def prev_before(self, at: Instant) -> Instant | None:
        """The fire, if it is strictly earlier than `at`."""
        return self.at if self.at < at else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedRule:
    """The fires of a rule that lie in [start_at, end_at); bounds are whole seconds."""

    rule: Rule
    start_at: Instant | None
    end_at: Instant | None

    def next_after(self, at: Instant) -> Instant | None:
        """The first fire strictly later than `at`; None if there is none."""
        if self.start_at is not None:
            at = max(at, self.start_at - 1)
        found = self.rule.next_after(at)
        if found is None or (self.end_at is not None and found >= self.end_at):
            return None
        return found

    def prev_before(self, at: Instant) -> Instant | None:
        """The last fire strictly earlier than `at`; None if there is none."""
        if self.end_at is not None:
            at = min(at, self.end_at)
        found = self.rule.prev_before(at)
        if found is None or (self.start_at is not None and found < self.start_at):
            return None
        return found


CompiledRule: TypeAlias = CronRule | IntervalRule | OnceRule


def first_fire(schedule: Schedule, *, now: Instant, seed: str = "") -> Instant | None:
    """The instant a schedule that takes effect `now` fires first; None: never.

    Strictly later than `now`, except that an interval without anchor begins at `now` rounded
    up, and that a `once` in the past stays where it is: it is due at once, and the misfire
    policy decides. `seed` is `{tenant}/{job_name}`.
    """
    spec = schedule.spec
    after = now
    if isinstance(spec, OnceSpec):
        after = ceil_second(spec.at) - 1
    elif isinstance(spec, IntervalSpec) and spec.anchor is None:
        after = now - 1
    return bounded_rule(schedule, anchor=ceil_second(now), seed=seed).next_after(after)


def next_fire(schedule: Schedule, *, after: Instant, seed: str = "") -> Instant | None:
    """The first fire strictly later than the fire `after`; None if there is none."""
    return bounded_rule(schedule, anchor=after, seed=seed).next_after(after)


def bounded_rule(schedule: Schedule, *, anchor: Instant, seed: str = "") -> BoundedRule:
    """The rule of a schedule with its bounds; `anchor` is any fire of an anchorless interval."""
    return BoundedRule(
        rule=compile_rule(schedule.spec, anchor=anchor, seed=seed),
        start_at=None if schedule.start_at is None else ceil_second(schedule.start_at),
        end_at=None if schedule.end_at is None else ceil_second(schedule.end_at),
    )


def unanchored(schedule: Schedule) -> Schedule:
    """The same schedule; an interval's fires are counted from whatever fire it is asked about."""
    assert isinstance(schedule.spec, IntervalSpec), "only intervals have anchors"
    return replace(schedule, spec=replace(schedule.spec, anchor=None))


def after_completion(
    schedule: Schedule, *, counted_from: Instant, after: Instant
) -> Instant | None:
    """When a job whose `every` counts from `counted_from` (a run's end, or a fire that made
    none) fires next, later than `after`; later ones follow in steps of `every`. None: never.
    """
    assert isinstance(schedule.spec, IntervalSpec), "only intervals count from an end"
    first = ceil_second(counted_from) + schedule.spec.every
    rule = BoundedRule(
        rule=IntervalRule(every=schedule.spec.every, anchor=first),
        start_at=None if schedule.start_at is None else ceil_second(schedule.start_at),
        end_at=None if schedule.end_at is None else ceil_second(schedule.end_at),
    )
    return rule.next_after(max(after, first - 1))


def compile_rule(spec: Spec, *, anchor: Instant, seed: str = "") -> CompiledRule:
    """The rule of a spec without bounds. Raises InvalidSchedule for a bad cron expression.

    `anchor` stands in for an interval's own, if it has none: any of its fires will do.
    """
    match spec:
        case CronSpec():
            return cron_rule(spec, seed=seed)
        case IntervalSpec():
            own = anchor if spec.anchor is None else ceil_second(spec.anchor)
            return IntervalRule(every=spec.every, anchor=own)
        case OnceSpec():
            return OnceRule(at=ceil_second(spec.at))


def cron_rule(spec: CronSpec, *, seed: str = "") -> CronRule:
    """The compiled rule, from a cache of RULES_CACHED. Raises InvalidSchedule."""
    # Without H the seed changes nothing, and jobs share the rule.
    hashed = any(_HASHED.search(expression[:256]) for expression in spec.expressions)
    return _compile(spec, seed if hashed else "")


@lru_cache(maxsize=RULES_CACHED)
def _compile(spec: CronSpec, seed: str) -> CronRule:
    return compile_cron(spec, seed=seed)


def interned_spec(spec: Spec, *, seed: str = "") -> Spec | None:
    """What jobs with the same rule share: H resolved, anchors left away.

    With a fire as `anchor`, `compile_rule` of it gives the fires that follow. None for
    `once`: nothing follows.
    """
    match spec:
        case CronSpec():
            return cron_rule(spec, seed=seed).canonical
        case IntervalSpec():
            return IntervalSpec(every=spec.every)
        case OnceSpec():
            return None


def validate(
    schedule: Schedule, now: Instant, *, seed: str = "", path: str = "job.schedule"
) -> None:
    """Raises InvalidSchedule or InvalidField, with a field path under `path`, unless all of
    the schedule is within its limits.
    """
    _validate_spec(schedule.spec, now, seed, path)
    start_at, end_at = schedule.start_at, schedule.end_at
    if start_at is not None and end_at is not None and ceil_second(end_at) <= ceil_second(start_at):
        raise InvalidField(
            "end_at: not later than start_at; allowed: at least a second after start_at",
            field=f"{path}.end_at",
        )
    if not 0 <= schedule.max_fires <= FIRES_MAX:
        raise _out_of_range(InvalidField, f"{path}.max_fires", schedule.max_fires, "0 or more")
    _validate_misfire(schedule.misfire, f"{path}.misfire_policy")
    if not 0 <= schedule.jitter <= JITTER_MAX:
        raise _out_of_range(InvalidField, f"{path}.jitter", _seconds(schedule.jitter), "0 s to 1 d")
    _validate_calendars(schedule, f"{path}.exclude_calendars")


def _validate_spec(spec: Spec, now: Instant, seed: str, path: str) -> None:
    match spec:
        case CronSpec():
            # Not from the cache: its errors would name the path of whoever asked first.
            rule = compile_cron(spec, seed=seed, path=f"{path}.cron")
            if rule.next_after(now) is None:
                raise InvalidSchedule(
                    "expressions: every time falls into an hour that clocks jump over, and "
                    "dst_gap is SKIP, so it would never fire; allowed: dst_gap RUN_AFTER_GAP, "
                    "or times that exist",
                    field=f"{path}.cron.expressions",
                    time_zone=spec.time_zone,
                )
        case IntervalSpec():
            if spec.every % SECOND or not EVERY_MIN <= spec.every <= EVERY_MAX:
                raise _out_of_range(
                    InvalidSchedule,
                    f"{path}.interval.every",
                    _seconds(spec.every),
                    "whole seconds, 1 s to 366 d",
                )
        case OnceSpec():
            ahead = spec.at - now
            if ahead > ONCE_AHEAD_MAX:
                raise _out_of_range(
                    InvalidSchedule,
                    f"{path}.once.at",
                    f"{_seconds(ahead)} ahead",
                    "at most 366 d ahead",
                )


def _validate_calendars(schedule: Schedule, path: str) -> None:
    names = schedule.exclude_calendars
    if names and isinstance(schedule.spec, OnceSpec):
        raise _out_of_range(
            InvalidField, path, f"{len(names)} with once", "none: a single fire is not excluded"
        )
    if len(names) > CALENDARS_MAX:
        raise _out_of_range(InvalidField, path, f"{len(names)} names", f"at most {CALENDARS_MAX}")
    if len(set(names)) < len(names):
        raise _out_of_range(InvalidField, path, "the same name twice", "each name once")


def _validate_misfire(policy: MisfirePolicy, path: str) -> None:
    if not THRESHOLD_MIN <= policy.threshold <= THRESHOLD_MAX:
        raise _out_of_range(
            InvalidField, f"{path}.threshold", _seconds(policy.threshold), "1 s to 1 d"
        )
    if policy.window is not None and policy.window < WINDOW_MIN:
        raise _out_of_range(
            InvalidField, f"{path}.window", _seconds(policy.window), "1 s or more, or absent"
        )
    if not 1 <= policy.max_catch_up <= CATCH_UP_MAX:
        raise _out_of_range(
            InvalidField, f"{path}.max_catch_up", policy.max_catch_up, f"1 to {CATCH_UP_MAX}"
        )


def _out_of_range(
    error: type[FencepostError], path: str, value: object, allowed: str
) -> FencepostError:
    name = path.rpartition(".")[2]
    return error(
        f"{name}: {value} is not allowed; allowed: {allowed}",
        field=path,
        value=str(value),
        allowed=allowed,
    )


def _seconds(duration: Duration) -> str:
    whole, rest = divmod(abs(duration), SECOND)
    sign = "-" if duration < 0 else ""
    fraction = f".{rest:06d}".rstrip("0") if rest else ""
    return f"{sign}{whole}{fraction} s"

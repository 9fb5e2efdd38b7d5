"""What must hold of every history, whatever was done to servers, workers and databases.

Each function returns the breaches it found, so that a test can show them all; the numbers are
those of docs/testing.md.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tests.checker.history import LIVE, Change, History, Key

# Who may become what in one step, written down a second time on purpose.
LEGAL: Mapping[str | None, frozenset[str]] = {
    None: frozenset({"queued", "blocked"}),
    "queued": frozenset({"queued", "running", "skipped", "cancelled", "dead"}),
    "blocked": frozenset({"blocked", "queued", "skipped", "cancelled"}),
    "running": frozenset({"running", "succeeded", "retrying", "queued", "dead", "cancelled"}),
    "retrying": frozenset({"retrying", "running", "succeeded", "queued", "dead", "cancelled"}),
    "dead": frozenset({"queued"}),
    "skipped": frozenset({"queued", "blocked"}),
    "succeeded": frozenset(),
    "cancelled": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Of the jobs under test, where they are not the defaults."""

    max_failures: int = 5
    max_lost_leases: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """How many attempts may be open at once; scopes that are not named have no cap."""

    tenants: Mapping[int, int] = field(default_factory=dict)
    queues: Mapping[int, int] = field(default_factory=dict)
    jobs: Mapping[str, int] = field(default_factory=dict)
    # For each (queue_id, concurrency_key) of the queue.
    keys_of_queues: Mapping[int, int] = field(default_factory=dict)


def one_place_per_run(history: History) -> list[str]:
    """I2: after each transaction a run is in exactly one place, or was never made."""
    breaches: list[str] = []
    for key, steps in history.steps.items():
        places: Counter[str] = Counter()
        for number, step in enumerate(steps):
            if step.operation == "insert":
                places[step.place] += 1
            elif step.operation == "delete":
                places[step.place] -= 1
            is_last = number + 1 == len(steps) or steps[number + 1].xid != step.xid
            if is_last and sum(places.values()) != 1:
                breaches.append(f"{_name(key)} is in {dict(+places)} after change {step.seq}")
    return breaches


def legal_transitions(history: History) -> list[str]:
    """I8: only the transitions of the table, and a final state is final."""
    breaches: list[str] = []
    for key, steps in history.steps.items():
        state: str | None = None
        for step in steps:
            if step.operation == "delete":
                continue
            if step.state not in LEGAL[state]:
                breaches.append(f"{_name(key)}: {state} -> {step.state} (change {step.seq})")
            state = step.state
    return breaches


def attempts_rise_by_one(history: History) -> list[str]:
    """I2, I4, I5: each claim raises the attempt by one, nothing lowers it, replays included,
    and no attempt is given to two workers."""
    breaches: list[str] = []
    for key, steps in history.steps.items():
        attempt = 0
        holders: dict[int, str | None] = {}
        state: str | None = None
        for step in steps:
            if step.operation == "delete":
                continue
            is_claim = step.state == "running" and step.attempt != attempt
            if is_claim and step.attempt != attempt + 1:
                breaches.append(f"{_name(key)}: claim {attempt} -> {step.attempt}")
            if not is_claim and step.attempt != attempt:
                breaches.append(
                    f"{_name(key)}: {state} -> {step.state} moved attempt "
                    f"{attempt} -> {step.attempt} without a claim (change {step.seq})"
                )
            if step.state == "running":
                holder = holders.setdefault(step.attempt, step.worker_id)
                if holder != step.worker_id:
                    breaches.append(
                        f"{_name(key)}: attempt {step.attempt} of {holder} and {step.worker_id}"
                    )
            attempt, state = step.attempt, step.state
    return breaches


def budgets_end_runs(history: History, budgets: Mapping[str, Budgets] | None = None) -> list[str]:
    """I5: a dead run has used up the budget it names, and no live one is over it.

    `budgets` by job_id; others have the defaults.
    """
    breaches: list[str] = []
    for key, steps in history.steps.items():
        budget = (budgets or {}).get(key.job_id, Budgets())
        for step in steps:
            if step.operation == "delete":
                continue
            if step.state == "dead":
                used_up = {
                    "max_failures": step.failure_count >= budget.max_failures,
                    "max_lost_leases": step.lost_lease_count >= budget.max_lost_leases,
                }.get(step.dead_reason or "", step.dead_reason is not None)
                if not used_up or step.attempt < 1:
                    breaches.append(f"{_name(key)}: dead too early: {step}")
            elif step.state in LIVE and (
                step.failure_count >= budget.max_failures
                or step.lost_lease_count >= budget.max_lost_leases
            ):
                breaches.append(f"{_name(key)}: goes on over its budget: {step}")
    return breaches


def all_ended(history: History) -> list[str]:
    """I3: nothing is live any more."""
    return [
        f"{_name(key)} is still {steps[-1].state}"
        for key, steps in history.steps.items()
        if steps[-1].operation != "delete" and steps[-1].state in LIVE
    ]


def caps_hold(history: History, caps: Caps) -> list[str]:
    """I6: at no position of the history are more attempts open than a cap allows."""
    breaches: list[str] = []
    limits: list[tuple[str, Callable[[Change], object], Callable[[Change], int | None]]] = [
        ("tenant", lambda c: c.tenant_id, lambda c: caps.tenants.get(c.tenant_id)),
        ("queue", lambda c: c.queue_id, lambda c: caps.queues.get(c.queue_id)),
        ("job", lambda c: c.key.job_id, lambda c: caps.jobs.get(c.key.job_id)),
        (
            "key",
            lambda c: (c.queue_id, c.concurrency_key),
            lambda c: None if c.concurrency_key is None else caps.keys_of_queues.get(c.queue_id),
        ),
    ]
    opened: dict[tuple[str, object], set[Key]] = defaultdict(set)
    for change in history.changes:
        is_open = (
            change.place == "run_queue" and change.operation != "delete" and change.attempt_open
        )
        for kind, scope_of, limit_of in limits:
            limit = limit_of(change)
            if limit is None:
                continue
            scope = (kind, scope_of(change))
            if is_open:
                opened[scope].add(change.key)
                if len(opened[scope]) > limit:
                    breaches.append(
                        f"{kind} {scope[1]}: {len(opened[scope])} open of {limit} "
                        f"at change {change.seq}"
                    )
            else:
                opened[scope].discard(change.key)
    return breaches


def fires_do_not_overlap(history: History, jobs: Iterable[str]) -> list[str]:
    """I7: of the runs that fires made for these jobs, at most one is not blocked at a time."""
    watched = set(jobs)
    breaches: list[str] = []
    unblocked: dict[str, set[Key]] = defaultdict(set)
    # A successor is promoted or made in the transaction after, or in that of, the end before.
    for xid_changes in _by_transaction(history.changes):
        for change in xid_changes:
            if change.key.job_id not in watched or change.origin == "enqueue":
                continue
            if change.place != "run_queue":
                continue
            is_in = change.operation != "delete" and change.state != "blocked"
            (unblocked[change.key.job_id].add if is_in else unblocked[change.key.job_id].discard)(
                change.key
            )
        for job_id in {change.key.job_id for change in xid_changes} & watched:
            if len(unblocked[job_id]) > 1:
                keys = sorted(_name(key) for key in unblocked[job_id])
                breaches.append(f"overlap after change {xid_changes[-1].seq}: {keys}")
    return breaches


def nothing_starts_early(
    history: History, *, tolerance: timedelta = timedelta(seconds=1)
) -> list[str]:
    """I9: no claim before the run is due and available, but for what a process's idea of the
    database clock may be off."""
    return [
        f"{_name(claim.key)} was claimed at {claim.at}, available at {claim.available_at}"
        for claim in history.claims()
        if claim.at < max(claim.key.scheduled_at, claim.available_at) - tolerance
    ]


def nobody_is_overtaken(history: History, *, by: timedelta = timedelta(seconds=60)) -> list[str]:
    """I10: within a tenant's queue, no run starts while one of the same kind and priority has
    been available for `by` longer and goes on waiting."""
    breaches: list[str] = []
    waiting: dict[tuple[int, int, int], dict[Key, datetime]] = defaultdict(dict)
    attempts: dict[Key, int] = {}
    for change in history.changes:
        if change.place != "run_queue":
            continue
        lane = waiting[change.queue_id, change.kind_id, change.priority]
        is_waiting = change.operation != "delete" and change.state in ("queued", "retrying")
        if is_waiting:
            lane[change.key] = change.available_at
        else:
            lane.pop(change.key, None)
        is_claim = change.state == "running" and change.attempt > attempts.get(change.key, 0)
        attempts[change.key] = change.attempt
        if is_claim and lane:
            oldest, since = min(lane.items(), key=lambda pair: pair[1])
            if change.available_at - since > by:
                breaches.append(f"{_name(change.key)} overtook {_name(oldest)} by {by}")
    return breaches


def everything_answered(
    history: History,
    expected: Mapping[str, set[datetime]],
    skipped: Mapping[str, set[datetime]],
) -> list[str]:
    """I1: each expected fire of a job has one run or one recorded skip, and nothing else has.

    Both by job_id; runs that were enqueued do not count.
    """
    made: dict[str, set[datetime]] = defaultdict(set)
    for key, steps in history.steps.items():
        if steps[0].origin != "enqueue":
            made[key.job_id].add(key.scheduled_at)
    breaches: list[str] = []
    for job_id in expected.keys() | made.keys() | skipped.keys():
        wanted = expected.get(job_id, set())
        had, left_out = made.get(job_id, set()), skipped.get(job_id, set())
        breaches += [f"{job_id} at {at}: no answer" for at in sorted(wanted - had - left_out)]
        breaches += [f"{job_id} at {at}: two answers" for at in sorted(had & left_out)]
        breaches += [f"{job_id} at {at}: unexpected" for at in sorted((had | left_out) - wanted)]
    return breaches


def always(history: History) -> list[str]:
    """What holds of any history at any time."""
    return [
        *one_place_per_run(history),
        *legal_transitions(history),
        *attempts_rise_by_one(history),
        *nothing_starts_early(history),
    ]


def _by_transaction(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes grouped where neighbours belong to one transaction."""
    groups: list[list[Change]] = []
    for change in changes:
        if groups and groups[-1][-1].xid == change.xid:
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _name(key: Key) -> str:
    return f"{key.job_id}/{key.scheduled_at.isoformat()}"

"""What is typed at `fencepost runs bulk`, read and put back into a command."""

import math
import re
import shlex
from dataclasses import dataclass
from typing import Self

from fencepost_server.cli.failure import usage
from fencepost_server.cli.paging import join_filter
from fencepost_server.cli.runs import since_instant

_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/s)?")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)")
_COUNT = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """How many to try: a share of what matches, or a number."""

    share: float = 0.0
    count: int = 0

    @classmethod
    def read(cls, text: str) -> Self:
        """1% or 20. Raises CliError."""
        if _COUNT.fullmatch(text) and int(text) > 0:
            return cls(count=int(text))
        if text.endswith("%"):
            share = read_share(text, flag="--canary")
            if share > 0:
                return cls(share=share)
        raise usage(
            f"--canary {text!r} says not how many", why="it is a share, 1%, or a number, 20"
        )

    def of(self, matched: int) -> int:
        """At least one."""
        return max(1, self.count or math.ceil(self.share * matched))


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFlags:
    """The flags as typed, for all three actions; rate None is the server's."""

    action: str
    filter: str | None
    job: str | None
    kind: str | None
    queue: str | None
    since: str | None
    rate: str | None
    max_runs: int
    reason: str
    dry_run: bool
    watch: bool
    timeout: str | None
    yes: bool
    error: str | None = None
    canary: Canary | None = None
    stop_when_failing: float | None = None
    newest_version: bool = False

    @property
    def conditions(self) -> str:
        """The filter. Raises CliError if nothing is said at all."""
        ended = "scheduled_at>" if self.action == "cancel" else "ended_at>"
        joined = join_filter(
            self.filter,
            [
                # The parent says the job too; here it stays visible in the operation.
                ("job", self.job),
                ("kind", self.kind),
                ("queue", self.queue),
                ("last_failure.code", self.error),
                (ended, since_instant(self.since)),
            ],
        )
        if joined:
            return joined
        raise usage(
            f"which runs to {self.action}?",
            why="neither --filter nor a flag that stands for a condition says it",
            hint=f"fencepost runs bulk {self.action} --help shows them; or --job JOB",
        )

    @property
    def runs_per_second(self) -> float:
        """0: the server's default. Raises CliError."""
        if self.rate is None:
            return 0.0
        match = _RATE.fullmatch(self.rate)
        if match is None or not 0.1 <= float(match[1]) <= 10_000:
            raise usage(
                f"--rate {self.rate!r} is not a rate", why="it is 0.1 to 10000 runs a second: 50"
            )
        return float(match[1])

    def without_canary(self) -> str:
        """The command that goes on after a canary."""
        words = ["fencepost", "runs", "bulk", self.action]
        for flag, value in (
            ("--filter", self.filter),
            ("--job", self.job),
            ("--kind", self.kind),
            ("--queue", self.queue),
            ("--error", self.error),
            ("--since", since_instant(self.since)),
            ("--rate", self.rate),
            ("--reason", self.reason or None),
        ):
            if value is not None:
                words += [flag, value]
        if self.stop_when_failing is not None:
            words += ["--stop-when-failing", f"{self.stop_when_failing:g}"]
        words += ["--newest-version"] if self.newest_version else []
        return shlex.join(words)


def read_share(text: str, *, flag: str = "--stop-when-failing") -> float:
    """20% or 0.2. Raises CliError."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise usage(f"{flag} {text!r} is not a share", why="it is 0% to 100%, or 0 to 1")
    return share

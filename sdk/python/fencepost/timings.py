"""The worker's own paces, in seconds; what the server decides comes with its Welcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Defaults are the protocol's; programs seldom have a reason to change them."""

    flush_after: float = 0.01
    """Longest wait of a completion, credit or receipt for company on the wire."""
    resend_after: float = 5.0
    """Without a verdict for this long a completion is sent again; doubles up to 40 s."""
    open_timeout: float = 10.0
    """Longest wait for a Welcome."""
    handover: float = 5.0
    """How long a drained session is still read for outstanding verdicts."""
    reconnect_base: float = 0.5
    """First bound of the random wait before a reconnect; doubles."""
    reconnect_cap: float = 15.0
    """Last bound of it."""
    healthy_after: float = 30.0
    """A session that lasted this long resets the pace of reconnects."""
    slow_retry: float = 30.0
    """Wait after a refusal that people must repair, such as a bad credential."""
    stop_wait: float = 2.0
    """At shutdown: wait for handlers to obey the cancel, once the grace is over."""
    farewell: float = 2.0
    """At shutdown: wait for the last verdicts, and again for the end of the stream."""

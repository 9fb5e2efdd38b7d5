"""Bounds of changes to many runs, and when replays fail again too often. Pure."""

RATE_DEFAULT, RATE_MIN, RATE_MAX = 50.0, 0.1, 10_000.0
# Matches that are counted when an operation is asked for.
COUNTED_MAX = 100_000
# Replays that must have ended before their share of failures says anything.
JUDGED_ENDED_MIN = 20


def is_failing(*, ended: int, dead: int, threshold: float) -> bool:
    """Whether more than `threshold` (0: never) of at least 20 ended replays are dead again."""
    return threshold > 0 and ended >= JUDGED_ENDED_MIN and dead > threshold * ended

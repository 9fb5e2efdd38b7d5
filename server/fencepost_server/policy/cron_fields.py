"""The fields of a cron expression: their names, their values, and the macros."""

from dataclasses import dataclass, field

MACROS = {
    "@HOURLY": "0 * * * *",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@WEEKLY": "0 0 * * 0",
    "@MONTHLY": "0 0 1 * *",
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
}

MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldKind:
    """What a field is called and may hold. `hash_high` bounds a bare H."""

    name: str
    low: int
    high: int
    hash_high: int
    names: dict[str, int] = field(default_factory=dict)
    extras: str = ""

    @property
    def size(self) -> int:
        """How many values there are; 7 is Sunday again."""
        return len(WEEKDAYS) if self is WEEKDAY else self.high - self.low + 1

    @property
    def allowed(self) -> str:
        """What an error message lists as allowed."""
        names = list(self.names)
        named = f", {names[0]}-{names[-1]}" if names else ""
        return f"{self.low}-{self.high}{named}, *, lists a,b, ranges a-b, steps */n, H{self.extras}"


SECOND = FieldKind(name="second", low=0, high=59, hash_high=59)
DAY = FieldKind(
    name="day of month", low=1, high=31, hash_high=28, extras=", ?, L, L-1 to L-30, 1W to 31W, LW"
)
WEEKDAY = FieldKind(
    name="day of week",
    low=0,
    high=7,
    hash_high=6,
    names={name: number for number, name in enumerate(WEEKDAYS)},
    extras=", ?, 5L (the last Friday), MON#1 to MON#5",
)
FIELDS = (
    FieldKind(name="minute", low=0, high=59, hash_high=59),
    FieldKind(name="hour", low=0, high=23, hash_high=23),
    DAY,
    FieldKind(
        name="month",
        low=1,
        high=12,
        hash_high=12,
        names={name: number for number, name in enumerate(MONTHS, start=1)},
    ),
    WEEKDAY,
)

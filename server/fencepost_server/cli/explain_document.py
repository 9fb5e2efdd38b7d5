"""The JSON form of what `fencepost explain` shows."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencepost_server.cli.explain_more import Comparison
    from fencepost_server.policy.cron import Planned
    from fencepost_server.policy.explain import Explanation, Gap


def document(
    found: "Explanation", hashed: list[str], beside: "Comparison | None"
) -> dict[str, Any]:
    """Field names are those of PreviewSchedule's answer, where it has them."""
    gaps = found.gaps
    return {
        **({} if beside is None else {"comparison": _comparison_document(beside)}),
        "description": found.description,
        "expressions": [fields.text for fields in found.rule.fields],
        "hashed": bool(hashed),
        "timeZone": found.rule.zone.name,
        "fires": [_fire_document(one) for one in found.fires],
        "gaps": {
            "smallest": _gap_document(gaps.smallest),
            "largest": _gap_document(gaps.largest),
            "changed": [_gap_document(gap) for gap in gaps.changed],
            "seenUntil": rfc3339(gaps.until),
        },
        "clockChanges": [
            {
                "at": rfc3339(change.at),
                "offsetBefore": f"{change.offset_before}s",
                "offsetAfter": f"{change.offset}s",
                "fires": [_fire_document(note) for note in change.notes],
                "moreFires": change.more,
                **(
                    {
                        "firstFireAfter": rfc3339(change.first_fire),
                        "utcTimeBefore": time_of_day(change.utc_before),
                        "utcTimeAfter": time_of_day(change.utc_after),
                    }
                    if change.first_fire is not None
                    else {}
                ),
            }
            for change in found.changes
        ],
        "warnings": list(found.warnings),
        "tzdataVersion": _tzdata_version(),
    }


def _comparison_document(beside: "Comparison") -> dict[str, Any]:
    return {
        "expressions": [fields.text for fields in beside.other.fields],
        "until": rfc3339(beside.until),
        "both": [rfc3339(at) for at in beside.both],
        "onlyHere": [rfc3339(at) for at in beside.only_here],
        "onlyThere": [rfc3339(at) for at in beside.only_there],
    }


def _tzdata_version() -> str:
    from fencepost_server.policy.zone import tzdata_version

    return tzdata_version()


def _fire_document(one: "Planned") -> dict[str, Any]:
    document: dict[str, Any] = {"scheduledAt": rfc3339(one.at), "localTime": one.local_time}
    if one.skip_reason is not None:
        document["skipReason"] = f"SKIP_REASON_{one.skip_reason.name}"
    if one.note:
        document["note"] = one.note
    return document


def _gap_document(gap: "Gap | None") -> dict[str, Any] | None:
    if gap is None:
        return None
    return {
        "length": f"{gap.length // 1_000_000}s",
        "after": rfc3339(gap.after),
        "until": rfc3339(gap.until),
    }


def rfc3339(at: int) -> str:
    """An instant as the API writes it."""
    from fencepost_server.clock import format_instant

    return format_instant(at)


def time_of_day(second: int) -> str:
    """HH:MM, with seconds only where there are some."""
    at = datetime.fromtimestamp(second, UTC)
    return at.strftime("%H:%M:%S" if at.second else "%H:%M")

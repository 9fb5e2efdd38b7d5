"""Updates that apply only to what the caller has read."""

from fencepost_server.api import validate
from fencepost_server.errors import EtagMismatch

ETAG_CHARS_MAX = 64


def read_etag(etag: str, field: str) -> str:
    """The etag as sent, "" for none. Raises InvalidField."""
    return validate.ascii_text(etag, field=field, chars_max=ETAG_CHARS_MAX)


def check_etag(sent: str, current: str, name: str) -> None:
    """Raises EtagMismatch if `sent` is set and not `current`."""
    if sent and sent != current:
        raise EtagMismatch(
            f"{name} has changed since it was read; read it again (its etag is {current})",
            field="etag",
            resource=name,
            name=name,
            currentEtag=current,
        )

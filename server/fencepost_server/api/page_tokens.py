"""Page tokens: where a list goes on, bound to the query that it belongs to.

A token is the key of the last row with an HMAC over it and all other parameters of the
call, so one that is made up, altered or sent with another query is refused.
"""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import Message

from fencepost_server.errors import InvalidPageToken

Key: TypeAlias = Sequence[str | int]

_MAC_BYTES = 16
_TOKEN_CHARS_MAX = 1024


class PageTokens:
    """Makes and reads tokens with the shard's key."""

    def __init__(self, *, key: bytes) -> None:
        self._key = key

    def make(self, last: Key, *, query: bytes) -> str:
        """The token that goes on after the row with the key `last`."""
        body = json.dumps(list(last), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._mac(body, query) + body).decode().rstrip("=")

    def read(self, token: str, *, query: bytes, field: str = "page_token") -> list[str | int]:
        """The key inside `token`. Raises InvalidPageToken unless we made it for `query`."""
        if len(token) > _TOKEN_CHARS_MAX or not token.isascii():
            raise _refused(field)
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except binascii.Error:
            raise _refused(field) from None
        mac, body = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body, query)):
            raise _refused(field)
        key: list[str | int] = json.loads(body)
        return key

    def _mac(self, body: bytes, query: bytes) -> bytes:
        return hmac.digest(self._key, query + body, "sha256")[:_MAC_BYTES]


def query_hash(request: Message) -> bytes:
    """A hash of what a list call asks for, whatever its page; the size may change."""
    query = type(request)()
    query.CopyFrom(request)
    query.ClearField("page_token")
    query.ClearField("page_size")
    name = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(name + b"\x00" + query.SerializeToString(deterministic=True)).digest()


def _refused(field: str) -> InvalidPageToken:
    return InvalidPageToken(
        f"{field}: not a token of this query; send next_page_token of the page before, "
        "with the same other parameters",
        field=field,
    )

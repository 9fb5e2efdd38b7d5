"""Request ids of calls: the id, and the hash of all that was asked with it."""

import hashlib

from google.protobuf.message import Message

from fencepost_server.api import validate
from fencepost_server.store.requests import RequestKey


def read_request(request: Message, *, parent: str = "") -> RequestKey | None:
    """The key of a request with a `request_id`; None if none was sent. Raises InvalidField.

    `parent` fills an empty one, so that an entry of a batch is the same as a single call.
    """
    body = type(request)()
    body.CopyFrom(request)
    request_id = validate.request_id(getattr(body, "request_id"))  # noqa: B009 - untyped Message
    if not request_id:
        return None
    body.ClearField("request_id")
    if parent:
        setattr(body, "parent", parent)  # noqa: B010 - untyped Message
    raw = body.SerializeToString(deterministic=True)
    return RequestKey(request_id=request_id, body_hash=hashlib.sha256(raw).digest())

"""Payloads: checked, then kept byte for byte as the message that carried them."""

from fencepost.v1 import payload_pb2

from fencepost_server.api import validate
from fencepost_server.errors import InvalidField

_CONTENT_TYPE_CHARS_MAX = 127
_ENCODING_CHARS_MAX = 63


def read_payload(message: payload_pb2.Payload, *, field: str) -> bytes | None:
    """The stored form, or None for an empty payload.

    Raises InvalidField, or PayloadTooLarge over 256 KiB of body.
    """
    body = message.WhichOneof("body")
    if body is None and (message.content_type or message.encoding):
        raise InvalidField(
            f"{field}: content_type or encoding without a body; set json or data",
            field=field,
            allowed="json or data",
        )
    if body is None:
        return None
    validate.ascii_text(
        message.content_type, field=f"{field}.content_type", chars_max=_CONTENT_TYPE_CHARS_MAX
    )
    validate.ascii_text(message.encoding, field=f"{field}.encoding", chars_max=_ENCODING_CHARS_MAX)
    # Rebuilt from the known fields, so that unknown ones are not stored.
    kept = payload_pb2.Payload(encoding=message.encoding)
    if body == "json":
        validate.payload_size(len(message.json.encode()), field=f"{field}.json")
        kept.json = message.json
    else:
        validate.payload_size(len(message.data), field=f"{field}.data")
        if not message.content_type:
            raise validate.missing(f"{field}.content_type", "the media type of `data`")
        kept.data = message.data
        kept.content_type = message.content_type
    return kept.SerializeToString(deterministic=True)

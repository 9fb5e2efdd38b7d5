"""Update masks: which fields of a stored resource a request replaces."""

from collections.abc import Mapping
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from fencepost_server.api.validate import refused

M = TypeVar("M", bound=Message)
PATHS_MAX = 100


def merged(
    stored: M,
    wanted: M,
    mask: FieldMask,
    *,
    changeable: frozenset[str],
    elsewhere: Mapping[str, str] | None = None,
) -> M:
    """A copy of `stored` with the masked fields of `wanted`.

    No mask: the fields that are set. `*`: all of `changeable`. `elsewhere` maps fields that
    another method changes to a hint; naming one is refused, as is an unknown path. Other
    fields are output only, and ignored.
    """
    paths = _paths(wanted, mask, changeable, elsewhere or {})
    result = type(stored)()
    result.CopyFrom(stored)
    for path in paths:
        _replace(wanted, result, path)
    return result


def _replace(source: Message, target: Message, path: str) -> None:
    """Sets or clears one field. FieldMask alone leaves fields of absent messages as they are."""
    head, _, rest = path.partition(".")
    if not rest:
        FieldMask(paths=[head]).MergeMessage(
            source, target, replace_message_field=True, replace_repeated_field=True
        )
    elif source.HasField(head) or target.HasField(head):
        _replace(getattr(source, head), getattr(target, head), rest)


def _paths(
    wanted: Message, mask: FieldMask, changeable: frozenset[str], elsewhere: Mapping[str, str]
) -> list[str]:
    if not mask.paths:
        return [each.name for each, _ in wanted.ListFields() if each.name in changeable]
    if len(mask.paths) > PATHS_MAX:
        raise refused("update_mask", f"{len(mask.paths)} paths", f"at most {PATHS_MAX} paths")
    if list(mask.paths) == ["*"]:
        return sorted(changeable)
    kept: list[str] = []
    for index, path in enumerate(mask.paths):
        field = f"update_mask.paths[{index}]"
        if path == "*":
            raise refused(field, path, "either * alone or single paths")
        # The stubs do not know that the C descriptor is one too.
        descriptor = cast("Descriptor", wanted.DESCRIPTOR)
        if not FieldMask(paths=[path]).IsValidForDescriptor(descriptor):
            known = ", ".join(sorted(changeable))
            raise refused(field, path, f"a path of {wanted.DESCRIPTOR.name}: {known}, or below")
        top = path.partition(".")[0]
        if top in elsewhere:
            raise refused(field, path, elsewhere[top])
        if top in changeable:
            kept.append(path)
    return kept

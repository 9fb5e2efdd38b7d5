"""Templates of concurrency keys: text in which braces stand for a run's labels and payload.

A template is checked here when a job is defined; the database makes the key of each run from it
(fencepost.run_concurrency_key), since runs are made there.
"""

import re

_PARTS = re.compile(r"\{\{|\}\}|[^{}]+|\{(?:label\.[^{}]+|payload\.(?P<path>[^{}]+))\}")
FORMS = (
    "text with {label.NAME} for a label of the run, {payload.PATH} for a value in its JSON "
    "payload (names and places in lists, with dots between them), {{ and }} for braces"
)


def template_problem(template: str) -> str | None:
    """What is wrong with a template and where, None if nothing is."""
    place = 0
    while place < len(template):
        part = _PARTS.match(template, place)
        if part is None:
            end = template.find("}", place)
            shown = template[place : end + 1] if end > place else template[place:]
            return f"{shown!r} at character {place + 1} is neither"
        if part["path"] is not None and "" in part["path"].split("."):
            return f"{part[0]!r} at character {place + 1} has an empty name in its path"
        place = part.end()
    return None

"""Random structured outputs for property tests: completions of a random model end soon, or never."""

import random

from samebits.engine import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "multiply"]}, "x": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "x"],
    "additionalProperties": False,
}
KINDS = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": r"[a-f]{2,9}(-[0-9]+){1,3}"},
    {"regex": r"(?s:.{1,12})"},
    {"choice": ["yes", "no", "yesterday", "perhaps"]},
    {"grammar": 'start: "(" start? ")" start?'},
]


def random_structure(rng: random.Random) -> StructuredOutputsParams:
    """One of the kinds of grammars."""
    return StructuredOutputsParams(**rng.choice(KINDS))

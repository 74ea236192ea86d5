"""The choice of a replica that knows the start of a prompt, so that its prefix cache is hit."""

from __future__ import annotations

from collections import OrderedDict

from ..engine.request import Request

RUN = 64  # tokens: prompts are compared by runs of this length
MAX_ENTRIES = 2**16


class PrefixAffinity:
    """A memory of which replica got each start of a prompt last."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, int] = OrderedDict()  # hash of a prompt's start -> number of a replica

    def keys(self, request: Request) -> list[int]:
        """Hashes of the starts of a request's prompt, shortest first."""
        tokens = request.prompt_token_ids
        key = hash(request.samples[0].cache_salt)
        found = []
        for start in range(0, len(tokens), RUN):
            key = hash((key, *tokens[start : start + RUN]))
            found.append(key)
        return found

    def find(self, keys: list[int]) -> int | None:
        """The replica that knows the longest of these starts."""
        return next((self._known[key] for key in reversed(keys) if key in self._known), None)

    def remember(self, keys: list[int], replica: int) -> None:
        """Note that a replica gets a prompt with these starts."""
        for key in keys:
            self._known[key] = replica
            self._known.move_to_end(key)
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)

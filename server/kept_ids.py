"""Token ids that were generated here, kept for the next turn of their conversation: nobody encodes their text again."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KeptTurn:
    """Conversation up to an answer: `messages` of them, and the ids of prompt and answer."""

    messages: int
    token_ids: array


class KeptIds:
    """The ids of the newest answers, by the conversation that they end; `max_tokens` of them in all, 4 bytes each.

    A conversation is known by its messages and by what else decides its rendering. Messages are compared without keys
    whose value is null or empty, which clients add and drop.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._turns: OrderedDict[bytes, KeptTurn] = OrderedDict()  # least recently used first

    def add(self, context: Any, messages: Sequence[dict], token_ids: Sequence[int]) -> None:
        """Keep the ids of a conversation whose last message is the answer."""
        *_, key = _keys(context, messages)
        self._drop(key)
        self._turns[key] = KeptTurn(len(messages), array("i", token_ids))
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._turns)))

    def find(self, context: Any, messages: Sequence[dict]) -> KeptTurn | None:
        """Return the longest start of a conversation that was generated here."""
        found = None
        for key in _keys(context, messages):
            if key in self._turns:
                self._turns.move_to_end(key)
                found = self._turns[key]
        return found

    def _drop(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        self.num_tokens -= len(turn.token_ids) if turn else 0


def _keys(context: Any, messages: Sequence[dict]) -> Iterator[bytes]:
    """A hash of each start of a conversation."""
    seen = hashlib.blake2b(_text(context), digest_size=16)
    for message in messages:
        seen.update(_text({key: value for key, value in message.items() if value}))
        yield seen.digest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()  # not orjson: a model may write integers of any size

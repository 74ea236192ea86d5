"""Token ids that were generated here, kept for the next turn of their conversation: nobody encodes their text again."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KeptTurn:
    """Conversation up to an answer: `messages` of them, and the ids of prompt and answer."""

    messages: int
    token_ids: array


class KeptIds:
    """The ids of the newest answers, by the conversation that they end; `max_tokens` of them in all, 4 bytes each."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._turns: OrderedDict[bytes, KeptTurn] = OrderedDict()  # least recently used first

    def add(self, key: bytes, messages: int, token_ids: Sequence[int]) -> None:
        """Keep the ids of a conversation of this key, whose last message is the answer."""
        self._drop(key)
        self._turns[key] = KeptTurn(messages, array("i", token_ids))
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._turns)))

    def find(self, keys: Sequence[bytes]) -> KeptTurn | None:
        """Return the longest start of a conversation that was generated here. keys: see `conversation_keys`."""
        key = next((key for key in reversed(keys) if key in self._turns), None)
        if key is None:
            return None
        self._turns.move_to_end(key)
        return self._turns[key]

    def _drop(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        self.num_tokens -= len(turn.token_ids) if turn else 0


def conversation_keys(context: Any, messages: Sequence[dict]) -> list[bytes]:
    """A hash of each start of a conversation: of none of its messages, of the first one, of the first two, and so on.

    context: what else decides its rendering. Both are JSON.
    """
    keys = [next_key(b"", {"context": context})]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: bytes, message: dict) -> bytes:
    """The key of a conversation with one more message. Null and empty values don't count: clients add and drop them."""
    told = {name: value for name, value in message.items() if value}
    text = json.dumps(told, sort_keys=True)  # not orjson: a model may write integers of any size
    return hashlib.blake2b(key + text.encode(), digest_size=16).digest()

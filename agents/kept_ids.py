"""Token ids that were generated here, kept for the next turn of their conversation: nobody encodes their text again."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class KeptIds:
    """The ids of prompt and answer of the newest answers, by the conversation that they end.

    There are `max_tokens` of them in all, 4 bytes each.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._turns: OrderedDict[bytes, array] = OrderedDict()  # least recently used first

    def add(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Keep the ids of a conversation of this key, whose last message is the answer."""
        self._drop(key)
        if len(token_ids) > self.max_tokens:
            return
        self._turns[key] = array("i", token_ids)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._turns)))

    def find(self, keys: Sequence[bytes]) -> tuple[int, Sequence[int]]:
        """Return the longest start of a conversation that was generated here: how many messages, and their ids.

        (0, ()) where there is none. keys: see `conversation_keys`.
        """
        for messages in reversed(range(len(keys))):
            if keys[messages] in self._turns:
                self._turns.move_to_end(keys[messages])
                return messages, self._turns[keys[messages]]
        return 0, ()

    def _drop(self, key: bytes) -> None:
        self.num_tokens -= len(self._turns.pop(key, ()))


def conversation_keys(context: Any, messages: Sequence[dict]) -> list[bytes]:
    """A hash of each start of a conversation: of none of its messages, of the first one, of the first two, and so on.

    context: what else decides its rendering. Both are JSON.
    """
    return [*itertools.accumulate(messages, next_key, initial=next_key(b"", {"context": context}))]


def next_key(key: bytes, message: dict) -> bytes:
    """The key of a conversation with one more message. Null and empty values don't count: clients add and drop them."""
    told = {name: value for name, value in message.items() if value}
    text = json.dumps(told, sort_keys=True)  # not orjson: a model may write integers of any size
    return hashlib.blake2b(key + text.encode(), digest_size=16).digest()

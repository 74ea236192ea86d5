"""Drafts from what was seen before: the tokens that followed where a sequence's last tokens occurred."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from .sequence import Sequence

MAX_PLACES = 16  # of one context that are followed, the newest
MAX_PROMPT = 4096  # tokens at a prompt's end that are indexed
MAX_HISTORY = 2**24  # tokens of finished rollouts that are kept, 4 bytes each


@dataclass(eq=False)
class Text:
    """Tokens that may be repeated: a prompt, or the end of one and a rollout."""

    tokens: list[int]


Place = tuple[Text, int]  # a text, and the number of a token in it
Stream = tuple[int, int]  # of random numbers: a seed and a sample index


class SuffixIndex:
    """The places in some texts after each run of `min_match` tokens."""

    def __init__(self, min_match: int):
        self.min_match = min_match
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def extend(self, text: Text, token: int) -> None:
        """Append a token to a text."""
        end = len(text.tokens)
        if end >= self.min_match:
            context = tuple(text.tokens[end - self.min_match :])
            self._places.setdefault(context, []).append((text, end))
        text.tokens.append(token)

    def find(self, tokens: list[int]) -> list[Place]:
        """Return the newest places whose tokens follow the same `min_match` tokens as the end of `tokens`."""
        return self._places.get(tuple(tokens[-self.min_match :]), [])[-MAX_PLACES:]


@dataclass(eq=False)
class Group:
    """The index of a prompt's texts while sequences of it run: `live` ones, and `ended` ones since it was made.

    twins: the newest earlier rollout of each stream.
    """

    index: SuffixIndex
    twins: dict[Stream, Text] = field(default_factory=dict)
    live: int = 0
    ended: int = 0


@dataclass(eq=False)
class Cursor:
    """A running sequence's own text, and the places in others that its last tokens led to.

    places: all those with the longest common context, and with shorter ones down to some length. known: tokens of the
    sequence that are in `text`.
    """

    key: bytes
    group: Group
    text: Text
    known: int
    places: list[Place] = field(default_factory=list)


class SuffixDrafter:
    """Drafts from the sequence itself and its prompt; `shared`: and from other rollouts of the prompt, old and new.

    Earlier rollouts are kept for at most `window` samples per prompt and MAX_HISTORY tokens in all; prompts that have
    not been used for longest go first. A rollout of the same random numbers (seed and sample index) goes before all
    others at the same position: under weights that moved a little, it draws the same tokens mostly.
    """

    def __init__(self, min_match: int, shared: bool, window: int):
        self.min_match = min_match
        self.shared = shared
        self.window = window
        self._groups: dict[bytes, Group] = {}
        self._cursors: dict[int, Cursor] = {}
        self._history: OrderedDict[bytes, deque[tuple[Stream, array]]] = OrderedDict()
        self._history_tokens = 0

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return up to `limit` tokens that may come next, and the share of places that agree on each."""
        cursor = self._cursors.get(seq.seq_id)
        if cursor is None:
            cursor = self._cursors[seq.seq_id] = self._enter(seq)
        self._follow(cursor, seq)
        own = cursor.text.tokens
        twin = cursor.group.twins.get((seq.seed, seq.sample_index))
        context = slice(max(0, len(own) - self.min_match), len(own))
        if twin is not None and len(twin.tokens) > len(own) and twin.tokens[context] == own[context]:
            tokens = twin.tokens[len(own) : len(own) + limit]
            return tokens, [1.0] * len(tokens)
        return _most_common(cursor.places, limit)

    def finish(self, seq: Sequence) -> None:
        """Keep a sequence's completion for later rollouts of its prompt, and forget the rest."""
        cursor = self._cursors.pop(seq.seq_id, None)
        if cursor is None:
            return
        group = cursor.group
        group.live -= 1
        group.ended += 1
        over = group.live == 0 or group.ended > 2 * self.window  # later sequences start with what is kept
        if over and self._groups.get(cursor.key) is group:
            del self._groups[cursor.key]
        if self.shared:
            self._keep(cursor.key, (seq.seed, seq.sample_index), array("i", seq.completion_token_ids))

    def _enter(self, seq: Sequence) -> Cursor:
        """Begin to follow a sequence, by itself or in its prompt's group."""
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        name = seq.cache_salt if self.shared else seq.seq_id.to_bytes(8, "little")
        key = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16, key=name).digest()
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(SuffixIndex(self.min_match))
            text = Text([])
            for token in prompt[-MAX_PROMPT:]:
                group.index.extend(text, token)
            for stream, rollout in self._history.get(key, ()):
                text = group.twins[stream] = Text(prompt[-self.min_match :])
                for token in rollout:
                    group.index.extend(text, token)
        group.live += 1
        return Cursor(key, group, Text(prompt[-self.min_match :]), seq.num_prompt_tokens)

    def _follow(self, cursor: Cursor, seq: Sequence) -> None:
        """Take in a sequence's new tokens. Places that went on otherwise are left; where none stays, find new ones."""
        for token in seq.token_ids[cursor.known :]:
            went_on = [(text, i) for text, i in cursor.places if i < len(text.tokens) and text.tokens[i] == token]
            cursor.places = [(text, i + 1) for text, i in went_on]
            cursor.group.index.extend(cursor.text, token)
        cursor.known = len(seq.token_ids)
        if not any(i < len(text.tokens) for text, i in cursor.places):
            cursor.places = cursor.group.index.find(cursor.text.tokens)

    def _keep(self, key: bytes, stream: Stream, rollout: array) -> None:
        rollouts = self._history.setdefault(key, deque())
        self._history.move_to_end(key)
        rollouts.append((stream, rollout))
        self._history_tokens += len(rollout)
        while len(rollouts) > self.window:
            self._history_tokens -= len(rollouts.popleft()[1])
        while self._history_tokens > MAX_HISTORY:
            _, oldest = self._history.popitem(last=False)
            self._history_tokens -= sum(len(tokens) for _, tokens in oldest)


def _most_common(places: list[Place], limit: int) -> tuple[list[int], list[float]]:
    """Follow the token on which most places agree, of equals the newest one's, and then the places that had it."""
    tokens: list[int] = []
    shares: list[float] = []
    while len(tokens) < limit:
        places = [(text, i) for text, i in places if i < len(text.tokens)]
        if not places:
            break
        votes = Counter(text.tokens[i] for text, i in reversed(places))
        token, count = votes.most_common(1)[0]
        tokens.append(token)
        shares.append(count / len(places))
        places = [(text, i + 1) for text, i in places if text.tokens[i] == token]
    return tokens, shares

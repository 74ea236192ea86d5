"""Drafts from what was seen before: the tokens that followed where a sequence's last tokens occurred."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .sequence import Sequence

MAX_PLACES = 16  # of one run that are followed, the newest
MAX_PROMPT = 4096  # tokens at a prompt's end that are indexed
MAX_LIVE = 2**21  # tokens of growing texts that are indexed, 900 bytes each with the usual lengths
MAX_HISTORY = 2**24  # tokens of finished rollouts that are kept, 4 bytes each, with ROLLOUT_TOKENS for each rollout
ROLLOUT_TOKENS = 300  # that take as much memory as the rest of what is kept of a rollout and its prompt
PART = 2**12
MAX_PART = 2**15
MAX_POOL = 2**18  # tokens of a pool's smallest part, of one not merged, and of all
MAX_POOLS = 8  # of the salts used last
END = -1  # of a text among others
NO_ROLLOUT = array("i")
HASH_BASE = 0x9E3779B97F4A7C15


Place = tuple[list[int], int]  # a text, which may be repeated and may grow, and the number of a token in it


class LiveIndex:
    """The places in growing texts after each run of tokens, for runs of `lengths`."""

    def __init__(self, lengths: Seq[int]):
        self.lengths = lengths
        self._places: dict[int, dict[tuple[int, ...], list[Place]]] = {n: defaultdict(list) for n in lengths}
        self.size = 0  # tokens

    def extend(self, text: list[int], tokens: Seq[int]) -> None:
        """Append tokens to a text."""
        old = len(text)
        text += tokens
        self.size += len(tokens)
        for length, places in self._places.items():
            for end in range(max(old, length), len(text)):
                places[tuple(text[end - length : end])].append((text, end))

    def find(self, run: list[int]) -> list[Place]:
        """Return the newest places after this run, whose length is one of `lengths`."""
        return self._places[len(run)].get(tuple(run), [])[-MAX_PLACES:]


class StillIndex:
    """The same for texts that don't grow. A table of runs would take ten times as long to make as their sorted hashes.

    Two runs of equal hash are taken for the same: a draft may be wrong.
    """

    def __init__(self, lengths: Seq[int], texts: Seq[Seq[int]]):
        tokens = np.concatenate([np.array([*text, END], np.int64) for text in texts])
        self._text: list[int] = tokens.tolist()
        self._hashes: dict[int, tuple[array, array]] = {}  # by length: sorted hashes, and the place after each run
        for length in lengths:
            places = length + np.flatnonzero(tokens[length:] != END)
            hashes = _hash_runs(tokens, length)[places - length]
            order = np.argsort(hashes, kind="stable")
            self._hashes[length] = (array("Q", hashes[order].tobytes()), array("q", places[order].tobytes()))

    def find(self, length: int, wanted: int) -> list[Place]:
        """Return the newest places after runs of this length, one of `lengths`, and this hash."""
        hashes, places = self._hashes[length]
        first = bisect_left(hashes, wanted)
        last = bisect_right(hashes, wanted, first)
        return [(self._text, place) for place in places[max(first, last - MAX_PLACES) : last]]


def _hash(run: list[int]) -> int:
    """Return the hash of one run, as `_hash_runs` has it."""
    found = 0
    for token in run:
        found = (found * HASH_BASE + token) % 2**64
    return found


def _hash_runs(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return a hash, uint64, of each run of `length` tokens: a polynomial in an odd number."""
    hashes = np.zeros(max(0, len(tokens) - length + 1), np.uint64)
    for start in range(length):
        hashes = hashes * np.uint64(HASH_BASE) + tokens[start : start + len(hashes)].astype(np.uint64)
    return hashes


class Pool:
    """The newest finished rollouts of all prompts, and the places after each run of `length` tokens.

    They are indexed in parts, as they come; small parts are merged, so that there are few to look into.
    """

    def __init__(self, length: int):
        self._length = length
        self._new: list[array] = []
        self._parts: list[tuple[StillIndex, list[array]]] = []  # oldest first

    def add(self, rollout: array) -> None:
        """Take a finished rollout in; it is found once there are enough of them for a part."""
        self._new.append(rollout)
        if _count(self._new) < PART:
            return
        texts = self._new
        self._new = []
        while self._parts and _count(self._parts[-1][1]) <= _count(texts) < MAX_PART:
            texts = self._parts.pop()[1] + texts
        self._parts.append((StillIndex([self._length], texts), texts))
        while sum(_count(part) for _, part in self._parts) > MAX_POOL:
            del self._parts[0]

    def find(self, run: list[int]) -> list[Place]:
        """Return places after this run, of `length` tokens, in the newest part that has any."""
        wanted = _hash(run)
        found = (part.find(self._length, wanted) for part, _ in reversed(self._parts))
        return next(filter(None, found), [])


def _count(texts: list[array]) -> int:
    return sum(map(len, texts))


@dataclass(eq=False)
class Group:
    """The places in a prompt's texts while sequences of it run: `live` ones, and `ended` ones since it was made.

    index: of its live texts where they are shared. rollouts: earlier ones, by `random_key`, the newest last.
    """

    index: LiveIndex
    prompt: list[int]
    rollouts: tuple[tuple[Hashable, array], ...]
    live: int = 0
    ended: int = 0

    @cached_property
    def by_key(self) -> dict[Hashable, array]:
        """The newest earlier rollout of each `random_key`."""
        return dict(self.rollouts)

    @cached_property
    def still(self) -> StillIndex:
        """The index of the prompt and of earlier rollouts. Made when first asked for, as it takes milliseconds."""
        lengths = self.index.lengths
        tail = self.prompt[-lengths[-1] :]
        return StillIndex(lengths, [*([*tail, *tokens] for _, tokens in self.rollouts), self.prompt])


@dataclass(eq=False)
class Cursor:
    """A running sequence's own text, and the places in others that its last tokens led to.

    index: where its text is: its own where nothing is shared. places: all those with the longest common context, and
    with shorter ones down to some length. known: tokens of the sequence that are in `text`. pool: other prompts'
    rollouts of its salt.
    """

    key: bytes
    group: Group
    index: LiveIndex
    pool: Pool
    text: list[int]
    known: int
    places: list[Place] = field(default_factory=list)


class SuffixDrafter:
    """A drafter that looks in the sequence itself and its prompt; `shared`: and in other rollouts.

    lengths: of the runs that lead to a place, longest first. The prompt's places, old and new, go before those of other
    prompts, which only the longest runs lead to. Earlier rollouts are kept for at most `window` samples per prompt and
    MAX_HISTORY tokens in all; prompts that have not been used for longest go first. A rollout of the same `random_key`
    goes before all others at the same position, as long as it agrees: under weights that moved a little, it draws the
    same tokens mostly.
    """

    seconds = 0.0  # of a proposal: small beside a step

    def __init__(self, lengths: Seq[int], shared: bool, window: int):
        self.lengths = lengths
        self.shared = shared
        self.window = window
        self._groups: dict[bytes, Group] = {}
        self._cursors: dict[int, Cursor] = {}
        self._history: OrderedDict[bytes, deque[tuple[Hashable, array]]] = OrderedDict()
        self._history_tokens = 0
        self._live_tokens = 0
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()  # by salt

    def source(self, seq: Sequence) -> str:
        """Return key, where the sequence agrees with a rollout of the same `random_key`, or texts."""
        return "key" if self._of_same_key(seq) else "texts"

    def propose(self, seq: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """Return up to `limit` tokens that may come next, and the share of places that agree on each."""
        cursor = self._cursor(seq)
        if earlier := self._of_same_key(seq):
            known = seq.num_completion_tokens
            tokens = [*earlier[known : known + limit]]
            return tokens, [1.0] * len(tokens)
        self._take_in(cursor, seq)  # not before: an earlier rollout's text is known
        if not any(i < len(text) for text, i in cursor.places):
            cursor.places = self._find(cursor)
        return _most_common(cursor.places, limit)

    def finish(self, seq: Sequence) -> None:
        """Keep a sequence's completion for later rollouts of its prompt, and forget the rest."""
        cursor = self._cursors.pop(seq.seq_id, None)
        if cursor is not None:
            group = cursor.group
            group.live -= 1
            group.ended += 1
            self._live_tokens -= group.index.size if group.live == 0 else 0
            self._live_tokens -= cursor.index.size if cursor.index is not group.index else 0
            over = group.live == 0 or group.ended > 2 * self.window  # later sequences start with what is kept
            if over and self._groups.get(cursor.key) is group:
                del self._groups[cursor.key]
        if self.shared and seq.num_completion_tokens:
            rollout = array("i", seq.completion_token_ids)
            self._keep(_key(seq) if cursor is None else cursor.key, seq.random_key, rollout)
            self._pool(seq.cache_salt).add(rollout)

    def _of_same_key(self, seq: Sequence) -> array:
        """Return the rollout of the same `random_key` if it has more tokens and those before agree; empty otherwise."""
        earlier = self._cursor(seq).group.by_key.get(seq.random_key, NO_ROLLOUT)
        known = seq.num_completion_tokens
        since = max(0, known - self.lengths[0])
        last = array("i", seq.token_ids[seq.num_prompt_tokens + since :])
        agrees = known < len(earlier) and earlier[since:known] == last
        return earlier if agrees else NO_ROLLOUT

    def _cursor(self, seq: Sequence) -> Cursor:
        """Follow a sequence, by itself or in its prompt's group."""
        if seq.seq_id in self._cursors:
            return self._cursors[seq.seq_id]
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        key = _key(seq)
        group = self._groups.get(key)
        if group is None:
            rollouts = tuple(self._history.get(key, ()))
            group = self._groups[key] = Group(LiveIndex(self.lengths), prompt[-MAX_PROMPT:], rollouts)
        group.live += 1
        index = group.index if self.shared else LiveIndex(self.lengths)
        cursor = Cursor(key, group, index, self._pool(seq.cache_salt), prompt[-self.lengths[-1] :], len(prompt))
        return self._cursors.setdefault(seq.seq_id, cursor)

    def _pool(self, salt: bytes) -> Pool:
        pool = self._pools.setdefault(salt, Pool(self.lengths[0]))
        self._pools.move_to_end(salt)
        if len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)
        return pool

    def _take_in(self, cursor: Cursor, seq: Sequence) -> None:
        """Index a sequence's new tokens, and leave the places that went on otherwise."""
        new = seq.token_ids[cursor.known :]
        if new:
            if self._live_tokens + len(new) > MAX_LIVE:
                cursor.text += new
            else:
                cursor.index.extend(cursor.text, new)
                self._live_tokens += len(new)
            length = len(new)
            went_on = [(text, i + length) for text, i in cursor.places if text[i : i + length] == new]
            cursor.places = [(text, i) for text, i in went_on if text[i : i + 1] != [END]]
            cursor.known += length

    def _find(self, cursor: Cursor) -> list[Place]:
        """Return the places after the longest run that ends the sequence and is known."""
        best: list[Place] = []
        for length in reversed(self.lengths):  # no longer run is known where a shorter one isn't
            run = cursor.text[-length:]
            if len(run) < length:
                break
            found = cursor.group.still.find(length, _hash(run))
            found += cursor.group.index.find(run)
            if cursor.index is not cursor.group.index:
                found += cursor.index.find(run)
            if not found:
                break
            best = found
        else:
            return best[-MAX_PLACES:]
        run = cursor.text[-self.lengths[0] :]  # known elsewhere it says more than a shorter one here
        elsewhere = cursor.pool.find(run) if len(run) == self.lengths[0] else []
        return elsewhere or best[-MAX_PLACES:]

    def _keep(self, key: bytes, random_key: Hashable, rollout: array) -> None:
        rollouts = self._history.setdefault(key, deque())
        self._history.move_to_end(key)
        for place, (same, kept) in enumerate(rollouts):
            if same == random_key and kept[: len(rollout)] == rollout:  # nothing new; it may have ended early
                del rollouts[place]
                self._history_tokens -= len(kept) + ROLLOUT_TOKENS
                rollout = kept
                break
        rollouts.append((random_key, rollout))
        self._history_tokens += len(rollout) + ROLLOUT_TOKENS
        while len(rollouts) > self.window:
            self._history_tokens -= len(rollouts.popleft()[1]) + ROLLOUT_TOKENS
        while self._history_tokens > MAX_HISTORY:
            _, oldest = self._history.popitem(last=False)
            self._history_tokens -= sum(len(tokens) + ROLLOUT_TOKENS for _, tokens in oldest)


def _key(seq: Sequence) -> bytes:
    """Return the name of the sequence's prompt among those of all salts."""
    prompt = array("q", seq.token_ids[: seq.num_prompt_tokens])
    return hashlib.blake2b(prompt.tobytes(), digest_size=16, key=seq.cache_salt).digest()


def _most_common(places: list[Place], limit: int) -> tuple[list[int], list[float]]:
    """Follow the token on which most places agree, of equals the newest one's, and then the places that had it."""
    tokens: list[int] = []
    shares: list[float] = []
    ahead = [_until_end(text[i : i + limit]) for text, i in reversed(places)]
    while ahead := [after for after in ahead if len(after) > len(tokens)]:
        number = len(tokens)
        if ahead.count(ahead[0]) == len(ahead):
            tokens += ahead[0][number:]
            shares += [1.0] * (len(tokens) - number)
            break
        following = [after[number] for after in ahead]
        token = max(dict.fromkeys(following), key=following.count)
        tokens.append(token)
        shares.append(following.count(token) / len(ahead))
        ahead = [after for after in ahead if after[number] == token]
    return tokens, shares


def _until_end(tokens: list[int]) -> list[int]:
    """Leave out the END, and what follows it of another text."""
    return tokens[: tokens.index(END)] if END in tokens else tokens

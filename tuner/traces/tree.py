"""The token tree: every distinct prefix of a batch's calls once, in depth-first order.

A call is the sequence `prompt_ids + completion_ids`. The tree uses only these ids, so turns,
sub-agents, parallel calls, n > 1, retries, compaction and rewritten history are no special cases.
For three calls, with each completion in brackets,

    1 2 [3]        node    0 1 2 3 4 5
    1 2 3 4 [5]    token   1 2 3 4 5 6        1 ─ 2 ─┬─ 3 ─ 4 ─ 5
    1 2 [6]        depth   0 1 2 3 4 2               └─ 6
                   parent -1 0 1 2 3 1
                   end     6 6 5 5 5 6

Siblings are ordered by their token, so the order of the calls does not matter. In lexicographic
order a sequence adds exactly the nodes after the prefix that it shares with its predecessor, and
the nodes come out in depth-first order. Cost: sorting the calls, then a few passes of numpy over
their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.engines.images import ALBUM, ImageOrder

IntArray = NDArray[np.int64]

_LARGEST_ID = 2**32 - 1  # ids are sorted as 4 bytes each


class HasIds(Protocol):
    """Input of the tree: a `Call`, a training row, or similar."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def completion_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, eq=False)
class TreeRow:
    """One path from a root to a leaf.

    Attributes:
        nodes: Nodes of the path, shape [L].
        ids: Their token ids, shape [L].
        samples: Number of calls that sampled each token, shape [L]; 0 for context, and for a token
            on a shared path that an earlier row of the tree counts. `samples > 0` is the training
                mask.
    """

    nodes: IntArray
    ids: IntArray
    samples: IntArray


@dataclass(frozen=True, eq=False)
class TokenTree:
    """The prefix tree over C calls: N nodes in depth-first order, one token each.

    Calls are named by their index in the sequence given to `build`. Calls with the same prefix
    share its nodes, those with equal ids share all of them, and each still counts as a sample:
    give a node the sum of the weights of the calls that list it in `completion_nodes`.

    The log-prob of node q's token is read at node `parent[q]`; q attends to k, itself included,
    if and only if `k <= q < end[k]`.

    Attributes:
        token: Token id, shape [N].
        depth: Number of tokens before it, which is its position id, shape [N].
        parent: Node before it, -1 at the start of a sequence, shape [N].
        end: First node after its subtree, shape [N].
        prompt_node: Node of each prompt's last token, -1 for an empty prompt, shape [C].
        completion_node: Nodes of all completions, call after call, shape [S].
        completion_start: Start of each call's part of `completion_node`, shape [C + 1].
        row_tokens: Tokens of all calls, each with its whole prompt.
    """

    token: IntArray
    depth: IntArray
    parent: IntArray
    end: IntArray
    prompt_node: IntArray
    completion_node: IntArray
    completion_start: IntArray
    row_tokens: int

    @classmethod
    def build(cls, calls: Sequence[HasIds]) -> TokenTree:
        """Build the tree of one batch's calls, from any number of rollouts, in any order.

        Raises:
            ValueError: A token id is negative or needs more than 32 bits.
        """
        keys, images = _sequence_keys(calls)
        # Big-endian bytes of equal width sort like the ids, and a prefix before its extensions.
        distinct = sorted(set(keys))
        rank = {key: i for i, key in enumerate(distinct)}
        members: list[list[int]] = [[] for _ in distinct]
        for call, key in enumerate(keys):
            members[rank[key]].append(call)

        ids = np.frombuffer(b"".join(distinct), dtype=">u4").astype(np.int64)
        length_D = np.array([len(key) // 4 for key in distinct], dtype=np.int64)
        start_D = _starts(length_D)[:-1]
        depth = np.arange(len(ids)) - np.repeat(start_D, length_D)
        shared_D = _shared_with_previous(ids, depth, start_D, length_D)
        is_new = depth >= np.repeat(shared_D, length_D)
        token, depth = ids[is_new], depth[is_new]
        if images is not None:
            token = images.inverse.renumbered(token)

        prompt_C = [len(call.prompt_ids) for call in calls]
        completion_C = np.array([len(call.completion_ids) for call in calls], dtype=np.int64)
        completion_start = _starts(completion_C)
        prompt_node = np.full(len(calls), -1, dtype=np.int64)
        completion_node = np.empty(completion_start[-1], dtype=np.int64)
        parent = np.arange(-1, len(token) - 1)
        end = np.full(len(token), len(token), dtype=np.int64)
        # The nodes of the current sequence: those that the next one does not share end before it.
        path = np.empty(length_D.max(initial=0), dtype=np.int64)
        first = previous = 0
        for shared, length, here in zip(shared_D.tolist(), length_D.tolist(), members, strict=True):
            end[path[shared:previous]] = first
            path[shared:length] = np.arange(first, first + length - shared)
            if length:
                parent[first] = path[shared - 1] if shared else -1
            for call in here:
                prompt = prompt_C[call]
                if prompt:
                    prompt_node[call] = path[prompt - 1]
                completion_node[completion_start[call] : completion_start[call + 1]] = path[
                    prompt:length
                ]
            first, previous = first + length - shared, length

        return cls(
            token=token,
            depth=depth,
            parent=parent,
            end=end,
            prompt_node=prompt_node,
            completion_node=completion_node,
            completion_start=completion_start,
            row_tokens=sum(len(key) for key in keys) // 4,
        )

    @property
    def unique_tokens(self) -> int:
        """N: tokens that a forward pass over the tree computes."""
        return len(self.token)

    @property
    def sampled_tokens(self) -> int:
        """S: completion tokens of all calls; equals `samples.sum()`."""
        return len(self.completion_node)

    @property
    def merge_ratio(self) -> float:
        """How many times more tokens one row per call would compute; 1 for an empty tree."""
        return self.row_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @cached_property
    def samples(self) -> IntArray:
        """Number of calls that sampled each node's token, shape [N]; 0 for context."""
        counts = np.bincount(self.completion_node, minlength=self.unique_tokens)
        return counts.astype(np.int64, copy=False)

    def completion_nodes(self, call: int) -> IntArray:
        """Nodes of one call's completion tokens, shape [T]."""
        return self.completion_node[self.completion_start[call] : self.completion_start[call + 1]]

    def path_nodes(self, call: int) -> IntArray:
        """Nodes of one call's `prompt_ids + completion_ids`, shape [P + T]."""
        completion = self.completion_nodes(call)
        last = completion[-1] if len(completion) else self.prompt_node[call]
        return np.flatnonzero(self.end[: last + 1] > last)

    def path(self, call: int) -> tuple[int, ...]:
        """One call's `prompt_ids + completion_ids`, read from the tree."""
        return tuple(self.token[self.path_nodes(call)].tolist())

    def rows(self) -> Iterator[TreeRow]:
        """Every path from a root to a leaf, in depth-first order.

        A node on several paths is counted in `samples` of the first of them and is context in the
        others, so the samples of all rows add up to `sampled_tokens`. A call that another call
        extends has no row of its own: its tokens are in that row.
        """
        path = np.empty(self.depth.max(initial=-1) + 1, dtype=np.int64)
        first = 0
        for leaf in np.flatnonzero(self.end == np.arange(1, self.unique_tokens + 1)).tolist():
            shared, length = self.depth[first], self.depth[leaf] + 1
            path[shared:length] = np.arange(first, leaf + 1)
            nodes = path[:length].copy()
            samples = self.samples[nodes]
            samples[:shared] = 0
            yield TreeRow(nodes=nodes, ids=self.token[nodes], samples=samples)
            first = leaf + 1


def sequence_keys(calls: Sequence[HasIds]) -> list[bytes]:
    """Each call's `prompt_ids + completion_ids` as bytes that compare like the ids, 4 per id, and
    images like their content.

    Raises:
        ValueError: A token id is negative or needs more than 32 bits.
    """
    return _sequence_keys(calls)[0]


def _sequence_keys(calls: Sequence[HasIds]) -> tuple[list[bytes], ImageOrder | None]:
    length_C = [len(call.prompt_ids) + len(call.completion_ids) for call in calls]
    parts = ((call.prompt_ids, call.completion_ids) for call in calls)
    every_id = chain.from_iterable(chain.from_iterable(parts))
    ids = np.fromiter(every_id, dtype=np.int64, count=sum(length_C))
    for id_ in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= id_ <= _LARGEST_ID:
            raise ValueError(f"{id_} is not a token id: ids are from 0 to {_LARGEST_ID}")
    images = ALBUM.order(ids)
    if images is not None:
        ids = images.renumbered(ids)
    raw = ids.astype(">u4").tobytes()
    bounds = (4 * _starts(np.array(length_C, dtype=np.int64))).tolist()
    return [raw[bounds[i] : bounds[i + 1]] for i in range(len(calls))], images


def _shared_with_previous(
    ids: IntArray, depth: IntArray, start_D: IntArray, length_D: IntArray
) -> IntArray:
    """Length of the prefix that each of D sequences shares with the previous one, shape [D].

    `ids` are all concatenated sequences, `depth` the position of each id within its sequence.
    """
    before = np.concatenate(([0], length_D[:-1]))[: len(length_D)]
    has_partner = depth < np.repeat(before, length_D)
    at = np.flatnonzero(has_partner)
    differs = ~has_partner
    differs[at] = ids[at] != ids[at - np.repeat(before, length_D)[at]]
    # The first difference at or after a sequence's start, if it is still inside the sequence.
    where = np.append(np.flatnonzero(differs), len(ids))
    return np.minimum(where[np.searchsorted(where, start_D)] - start_D, length_D)


def _starts(lengths: IntArray) -> IntArray:
    """Offsets of concatenated parts, shape [parts + 1]; the last is the total."""
    return np.concatenate(([0], np.cumsum(lengths)))

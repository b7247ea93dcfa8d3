"""Which call of a rollout goes on from which: read from token ids, never from the order of arrival.

A call goes on from another when that one's `prompt_ids + completion_ids` is the beginning of its
prompt; of several such calls from the longest. With each completion in brackets:

    a   s [1 2]                     ─ a ─┬─ b ── d
    b   s 1 2 u [3]                      └─ c          b and c are answers to the same turn
    c   s 1 2 u [4]
    d   s 1 2 u 3 v [5]             ─ e                a sub-agent with a prompt of its own
    e   t [6]

d goes on from b and not from c, whichever of them came first. Calls with equal ids cannot be told
apart: what goes on from one goes on from each. A prompt that was rendered afresh (history rewritten
or compacted, reasoning left out by the template) goes on from none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tuner.traces.tree import HasIds, sequence_keys


def successors(calls: Sequence[HasIds], rollouts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each of C calls the calls of its rollout that go on from it.

    Args:
        calls: In any order; a call has a completion.
        rollouts: Index of each call's rollout.

    Returns:
        C tuples of indices into `calls`, in rising order; empty for a call that is a leaf.

    Raises:
        ValueError: A token id is negative or needs more than 32 bits.
    """
    keys = sequence_keys(calls)
    members: dict[int, list[int]] = defaultdict(list)
    for call, rollout in enumerate(rollouts):
        members[rollout].append(call)
    found: list[tuple[int, ...]] = [()] * len(calls)
    for mine in members.values():
        for call, after in _of_rollout(calls, keys, mine).items():
            found[call] = tuple(sorted(after))
    return tuple(found)


def _of_rollout(
    calls: Sequence[HasIds], keys: Sequence[bytes], mine: Sequence[int]
) -> dict[int, list[int]]:
    # In lexicographic order what a sequence is the beginning of follows right behind it, so those
    # that a prompt begins with are the open ones. A prompt comes behind the sequence it equals.
    ends = [(keys[call], 0, call) for call in mine]
    prompts = [(keys[call][: 4 * len(calls[call].prompt_ids)], 1, call) for call in mine]
    open_: list[tuple[bytes, list[int]]] = []
    found: dict[int, list[int]] = {}
    for key, is_prompt, call in sorted(ends + prompts):
        while open_ and not key.startswith(open_[-1][0]):
            open_.pop()
        if is_prompt:
            for before in open_[-1][1] if open_ else ():
                found.setdefault(before, []).append(call)
        elif open_ and open_[-1][0] == key:
            open_[-1][1].append(call)
        else:
            open_.append((key, [call]))
    return found

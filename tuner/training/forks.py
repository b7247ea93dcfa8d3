"""Advantages of every sampled token when rollouts of a task branch from others.

A trunk starts at the beginning of the task, a branch at a point (x) inside another rollout: what
precedes the point is replayed, what follows is sampled anew. Every rollout is a leaf with a reward:

    trunk a   |------x-----------x----- 1        value of a    before the first x: 1/4
    branch b         |----------------- 0                      between the two:    1/2
    branch c                     |----- 0                      behind the second:  1
    trunk d   |------------------------ 0

At a fork the trunk's continuation and all branches that begin there are children; the value of a
stretch is its rollout's reward, or the mean over the children of the fork that it ends in. With T
trunks a token gets

    advantage = value of its stretch - mean value of the other children of the fork above it
    weight    = product of 1 / children over all forks above it

and the trunks are the children of the task. The sum over all sampled tokens of `weight * advantage
* grad log pi`, divided by T, is an unbiased estimate of the policy gradient: given the state at a
fork its children are independent draws from one distribution, so their mean estimates the value of
one of them, and a sibling's value is a baseline that does not depend on the token. Without branches
it is the leave-one-out estimate. A fork with one child left (the others failed) is not a fork: the
child has the advantage of the stretch before it, whose baseline is as independent of it.

**Which points are allowed.** All of this requires that a point is chosen *predictably*: from what
was known before it (the rollout up to there, other trunks, earlier steps, a random number drawn
beforehand) and from nothing that came after it in the rollout that is branched from. Its reward
came after, and so did its length: "one of the trunk's calls, drawn evenly" is biased, since short
trunks, which may be the bad ones, are branched from earlier. Draw the call's index beforehand, and
do not branch from a trunk without such a call. The number of branches at a point must be chosen the
same way. If calls run concurrently, the order of their commitment depends on what the others
sample: a point is allowed only if no other call is in flight.

Failed rollouts are dropped as everywhere. That is unbiased if failing does not depend on what was
sampled. Whether anything of a tree remains must not depend on it either: a trunk that was branched
from stays in its group when it fails, one that was too short for branching does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import fmean
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Id = TypeVar("Id", bound=Hashable)
Position = tuple[int, int]
"""Index of a call in its rollout, and of a token in the call."""


@dataclass(frozen=True)
class Point(Generic[Id]):
    """The point where a branch begins.

    Attributes:
        rollout: The rollout that it branches from.
        call: Number of that rollout's calls, in order of commitment, before the point.
        token: Number of sampled tokens of the call at the point that come before it.
    """

    rollout: Id
    call: int
    token: int = 0

    @property
    def position(self) -> Position:
        return self.call, self.token


@dataclass(frozen=True)
class Piece(Generic[Id]):
    """Tokens of a call that are trained.

    Attributes:
        rollout: The rollout of the call.
        call: Its index there, in order of commitment, counting replayed calls.
        start: Index of the first of the tokens in the completion.
        count: Number of tokens.
    """

    rollout: Id
    call: int
    start: int
    count: int


@dataclass(frozen=True)
class TreeAdvantages:
    """Advantages and weights of the tokens of the pieces.

    Attributes:
        advantages: For each piece those of its tokens, float64.
        weights: Likewise; both are 0 if no used rollout continues from a token.
        trunks: For each group the number of trees with used rollouts, by which the sum is divided.
    """

    advantages: tuple[NDArray[np.float64], ...]
    weights: tuple[NDArray[np.float64], ...]
    trunks: Mapping[Hashable, int]


def tree_advantages(
    rewards: Mapping[Id, float],
    groups: Mapping[Id, Hashable],
    origins: Mapping[Id, Point[Id]],
    pieces: Sequence[Piece[Id]],
    *,
    normalize_forks: bool = False,
    normalize_trunks: bool = False,
    epsilon: float = 1e-6,
) -> TreeAdvantages:
    """Advantages and weights of tokens in trees of rollouts; see the module's docstring.

    With division by a standard deviation they are no unbiased estimate of a gradient: small
    differences count as much as large ones. Tree-GRPO (arXiv 2509.21240) divides within trees and
    across them.

    Args:
        rewards: Rewards of the used rollouts, trunks and branches.
        groups: Groups of the same rollouts; rollouts of one task share one.
        origins: Origins of all branches, including unused ones. A rollout without one is a trunk.
        pieces: The trained tokens, in any order, including tokens of unused rollouts that others
            branch from. Replayed tokens belong to the rollout that sampled them; each token may be
            in one piece only.
        normalize_forks: Divide the advantages after a fork by the standard deviation of its
            children's values.
        normalize_trunks: Divide those before every fork by that of the trunks' values.
        epsilon: Added to the standard deviation.

    Raises:
        ValueError: A group has used rollouts in one tree only, a tree has rollouts of two groups, a
            token is in two pieces, or origins form a cycle.
    """
    tree = _Tree(rewards, origins)
    roots = _roots({id_: groups[id_] for id_ in rewards}, tree)
    # Ancestors first; the beginnings of tasks have none.
    forks: list[_Fork[Id]] = [*((None, children) for children in roots.values())]
    forks += tree.forks.items()
    compared = _compared(
        [[tree.values[child] for child in children] for _, children in forks],
        [normalize_trunks if above is None else normalize_forks for above, _ in forks],
        epsilon,
    )
    scores: dict[_Stretch[Id], tuple[float, float]] = {}
    for (above, children), found in zip(forks, compared, strict=True):
        advantage, weight = (0.0, float(len(children))) if above is None else scores[above]
        for child, one in zip(children, found or [advantage], strict=True):
            scores[child] = one, weight / len(children)
    parts = [list(tree.parts(piece)) for piece in pieces]
    _check_once(part for one in parts for part in one)
    tokens = [_tokens(one, scores) for one in parts]
    return TreeAdvantages(
        advantages=tuple(one[0] for one in tokens),
        weights=tuple(one[1] for one in tokens),
        trunks={group: len(children) for group, children in roots.items()},
    )


@dataclass(frozen=True)
class Value:
    """The value of a point in a rollout.

    Attributes:
        mean: Mean reward of the rollouts that continue from it, each child of a fork counting
            equally; advantages are made of it.
        ends: Number of these rollouts.
    """

    mean: float
    ends: int


def point_values(
    rewards: Mapping[Id, float], origins: Mapping[Id, Point[Id]]
) -> dict[Point[Id], Value]:
    """The value of each point at which rollouts begin.

    Values are not stored but recomputed from the traces of a group (rewards and origins), which
    also allows other rewards. A stored value would be outdated as soon as another rollout ends that
    continues from the point, which is after the trace was written.

    Args:
        rewards: Rewards of the rollouts that have one, of one task or of several.
        origins: Origins of all branches, including those without a reward.

    Returns:
        By the point in the rollout that sampled what precedes it; without points from which no
        rollout with a reward continues.

    Raises:
        ValueError: Origins form a cycle.
    """
    tree = _Tree(rewards, origins)
    ends = dict.fromkeys(tree.values, 1)
    for above, children in reversed(tree.forks.items()):
        ends[above] = sum(ends[child] for child in children)
    return {
        Point(rollout, *tree.cuts[rollout][number]): Value(
            tree.values[rollout, number], ends[rollout, number]
        )
        for rollout, number in tree.forks
    }


def resolved(origins: Mapping[Id, Point[Id]]) -> dict[Id, Point[Id]]:
    """Each origin as a point of the rollout that sampled what comes right before it.

    A branch of a branch may begin in its replayed part; its origin is then in the rollout that was
    replayed.

    Raises:
        ValueError: Origins form a cycle.
    """
    order = TopologicalSorter({id_: [point.rollout] for id_, point in origins.items()})
    found: dict[Id, Point[Id]] = {}
    try:
        for id_ in order.static_order():
            if id_ in origins:
                found[id_] = _resolved(origins[id_], found)
    except CycleError as error:
        raise ValueError(f"rollouts begin inside each other: {error.args[1]}") from None
    return found


def trunk_of(rollout: Id, origins: Mapping[Id, Point[Id]]) -> Id:
    """The trunk of a rollout's tree."""
    while rollout in origins:
        rollout = origins[rollout].rollout
    return rollout


def _resolved(point: Point[Id], origins: Mapping[Id, Point[Id]]) -> Point[Id]:
    above = origins.get(point.rollout)
    while above is not None and point.position <= above.position:
        point = replace(point, rollout=above.rollout)
        above = origins.get(point.rollout)
    return point


# A rollout, and the number of its forks before the stretch.
_Stretch = tuple[Id, int]
# The stretch that ends in the fork, and those that begin there and lead to a used rollout.
_Fork = tuple[_Stretch[Id] | None, Sequence[_Stretch[Id]]]


@dataclass(frozen=True)
class _Part(Generic[Id]):
    """Tokens [start, stop) of a call that lie in one stretch."""

    stretch: _Stretch[Id]
    call: int
    start: int
    stop: int


class _Tree(Generic[Id]):
    """The rollouts of all tasks, cut where others branch from them.

    Attributes:
        origins: Origins of branches, resolved.
        cuts: The positions in each rollout at which others begin, in order.
        values: Of the stretches that lead to a used rollout: its reward, or the mean over the
            children of the fork that it ends in.
        forks: Those of them that end in a fork, ancestors first, each with its children.
    """

    def __init__(self, rewards: Mapping[Id, float], origins: Mapping[Id, Point[Id]]) -> None:
        self.origins = resolved(origins)
        self.cuts: defaultdict[Id, list[Position]] = defaultdict(list)
        begun: defaultdict[tuple[Id, Position], list[Id]] = defaultdict(list)
        for id_, point in self.origins.items():
            begun[point.rollout, point.position].append(id_)
        forks: dict[_Stretch[Id], list[_Stretch[Id]]] = {}
        # What begins inside a branch begins after the branch's own point, so one order serves all.
        for rollout, position in sorted(begun, key=lambda where: where[1]):
            number = len(self.cuts[rollout])
            self.cuts[rollout].append(position)
            branches = [(id_, 0) for id_ in begun[rollout, position]]
            forks[rollout, number] = [(rollout, number + 1), *branches]
        self.values = {(id_, len(self.cuts[id_])): reward for id_, reward in rewards.items()}
        for above, children in reversed(forks.items()):
            if left := [self.values[child] for child in children if child in self.values]:
                self.values[above] = fmean(left)
        self.forks = {
            above: [child for child in children if child in self.values]
            for above, children in forks.items()
            if above in self.values
        }

    def parts(self, piece: Piece[Id]) -> Iterator[_Part[Id]]:
        """Split a piece into parts that lie in one stretch each, in order."""
        edges = {piece.start, piece.start + piece.count}
        owner = piece.rollout
        inside = list(self.cuts[owner])
        while owner in self.origins:
            inside.append(self.origins[owner].position)
            owner = self.origins[owner].rollout
            inside += self.cuts[owner]
        edges |= {token for call, token in inside if call == piece.call}
        within = sorted(edge for edge in edges if 0 <= edge - piece.start <= piece.count)
        for start, stop in pairwise(within):
            yield _Part(self._stretch(piece.rollout, (piece.call, start)), piece.call, start, stop)

    def _stretch(self, rollout: Id, position: Position) -> _Stretch[Id]:
        """The stretch in which the token at a position of a rollout was sampled."""
        while rollout in self.origins and position < self.origins[rollout].position:
            rollout = self.origins[rollout].rollout
        return rollout, bisect_right(self.cuts[rollout], position)


def _roots(groups: Mapping[Id, Hashable], tree: _Tree[Id]) -> dict[Hashable, list[_Stretch[Id]]]:
    """The first stretches of the trees of each group that have used rollouts."""
    group_of: dict[Id, Hashable] = {}
    for id_, group in groups.items():
        if group_of.setdefault(trunk_of(id_, tree.origins), group) != group:
            raise ValueError(
                f"rollout {id_} of group {group} branches from one of group "
                f"{group_of[trunk_of(id_, tree.origins)]}: a tree's rollouts must share a task"
            )
    roots: defaultdict[Hashable, list[_Stretch[Id]]] = defaultdict(list)
    for trunk, group in group_of.items():
        roots[group].append((trunk, 0))
    for group, found in roots.items():
        if len(found) == 1:
            raise ValueError(
                f"the remaining rollouts of group {group} are all of one tree, so the tokens "
                "before its forks have no baseline: drop the group, or start at least two "
                "rollouts of a task at the beginning"
            )
    return dict(roots)


def _compared(
    sets: Sequence[Sequence[float]], normalized: Sequence[bool], epsilon: float
) -> list[list[float]]:
    """Each value minus the mean of the others of its set; a set of one gives nothing."""
    found: list[list[float]] = [[] for _ in sets]
    several = [number for number, values in enumerate(sets) if len(values) > 1]
    if not several:
        return found
    # Imported here, since point values are also read where nothing else needs PyTorch.
    import torch

    from tuner.training.advantages import group_std, leave_one_out

    sizes = torch.tensor([len(sets[number]) for number in several])
    set_C = torch.arange(len(several)).repeat_interleave(sizes)
    values = [value for number in several for value in sets[number]]
    values_C = torch.tensor(values, dtype=torch.float64)
    found_C = leave_one_out(values_C, torch.arange(len(values)), set_C)
    divided_S = torch.tensor([normalized[number] for number in several])
    if divided_S.any():
        std_S = torch.where(divided_S, group_std(values_C, set_C) + epsilon, 1.0)
        found_C = found_C / std_S[set_C]
    for number, one in zip(several, found_C.split(sizes.tolist()), strict=True):
        found[number] = one.tolist()
    return found


def _check_once(parts: Iterable[_Part[Id]]) -> None:
    """Raise ValueError for tokens that are in two pieces."""
    calls: defaultdict[tuple[Id, int], list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        calls[part.stretch[0], part.call].append((part.start, part.stop))
    for (rollout, call), spans in calls.items():
        for (_, stop), (start, _) in pairwise(sorted(spans)):
            if start < stop:
                raise ValueError(
                    f"token {start} of call {call} of rollout {rollout} is in two pieces: train "
                    "replayed tokens once, with the rollout that sampled them"
                )


def _tokens(
    parts: Sequence[_Part[Id]], scores: Mapping[_Stretch[Id], tuple[float, float]]
) -> NDArray[np.float64]:
    """Advantages and weights of the tokens of a piece, shape [2, T]."""
    found = [scores.get(part.stretch, (0.0, 0.0)) for part in parts]
    lengths = [part.stop - part.start for part in parts]
    return np.repeat(np.array(found, dtype=np.float64).reshape(-1, 2), lengths, axis=0).T

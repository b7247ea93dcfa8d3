"""Which call sampled each token that a trajectory wants trained; nothing else is trained.

A trajectory is a list of ids and a mask; the log-probs, versions and sampling settings of a call
are facts of the trace. Each stretch of masked tokens is found in the calls of its episode:

    trajectory  q q q a a a o o b b      q prompt, a and b sampled, o put in by the agent
    mask        0 0 0 1 1 1 0 0 1 1
    calls       q q q|a a a
                q q q a a a o o|b b

so a token that nobody sampled after exactly the tokens before it cannot be trained, and one that
was sampled once cannot be trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.areal.tensors import Trajectory
from tuner.errors import FunctionError
from tuner.traces import Call

# The log-probs came through a float32 tensor.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Settled:
    """What the trajectories of an episode came to.

    Attributes:
        owners: For each trajectory the call that sampled each of its tokens, None where it is not
            trained; shape [L] each.
        trained: For each call the trajectory that trains it and the places in its completion that
            are trained; None for a call that no trajectory trains.
    """

    owners: tuple[tuple[int | None, ...], ...]
    trained: tuple[tuple[int, frozenset[int]] | None, ...]


def settle(trajectories: Sequence[Trajectory], calls: Sequence[Call], source: str) -> Settled:
    """Find every trained token among the calls.

    Where two calls sampled the same tokens after the same prompt, each trajectory gets one of
    them. Where trajectories share a call, the first trains it.

    Raises:
        FunctionError: No call sampled a token that is to be trained, its log-prob or version is
            not the recorded one, or two trajectories with different rewards train the same call.
    """
    owners: list[tuple[int | None, ...]] = []
    trained: list[tuple[int, frozenset[int]] | None] = [None] * len(calls)
    for index, trajectory in enumerate(trajectories):
        taken = frozenset(i for i, entry in enumerate(trained) if entry is not None)
        cover = _cover(trajectory, calls, taken)
        places: dict[int, set[int]] = {}
        row: list[int | None] = [None] * len(cover)
        for place, wanted in enumerate(trajectory.loss_mask):
            if not wanted:
                continue
            found = cover[place]
            if found is None:
                raise FunctionError(
                    f"trajectory {index} of {source} has loss_mask 1 at token {place} (id "
                    f"{trajectory.input_ids[place]}), but no call of this episode sampled it after "
                    "the tokens before it: train sampled tokens only, and append them unchanged"
                )
            inside = place - len(calls[found].prompt_ids)
            _check_recorded(trajectory, place, calls[found], inside, f"{index} of {source}")
            before = trained[found]
            if before is None:
                row[place] = found
                places.setdefault(found, set()).add(inside)
            elif trajectories[before[0]].reward != trajectory.reward:
                raise FunctionError(
                    f"trajectories {before[0]} and {index} of {source} train the same call "
                    f"({calls[found].id}), with rewards {trajectories[before[0]].reward:g} and "
                    f"{trajectory.reward:g}: a token is trained once, so set loss_mask to 0 in one"
                )
            elif inside not in before[1]:
                raise FunctionError(
                    f"trajectories {before[0]} and {index} of {source} train different parts of "
                    f"the same call ({calls[found].id}): train all of it in one of them"
                )
        for call, inside_places in places.items():
            trained[call] = (index, frozenset(inside_places))
        owners.append(tuple(row))
    return Settled(tuple(owners), tuple(trained))


def _cover(
    trajectory: Trajectory, calls: Sequence[Call], taken: frozenset[int]
) -> list[int | None]:
    """The call that may have sampled each token: of several the one with the longest prompt, then
    the one that agrees the longest, then one that is not taken yet."""
    ids = trajectory.input_ids
    by_prompt: dict[int, list[tuple[int, bool, int]]] = {}
    for index, call in enumerate(calls):
        start = len(call.prompt_ids)
        if call.invalid is not None or call.undelivered or call.prompt_ids != ids[:start]:
            continue
        agreed = 0
        for ours, theirs in zip(ids[start:], call.completion_ids, strict=False):
            if ours != theirs:
                break
            agreed += 1
        if agreed:
            by_prompt.setdefault(start, []).append((agreed, index not in taken, -index))
    cover: list[int | None] = [None] * len(ids)
    for start in sorted(by_prompt):
        agreed, _, negative = max(by_prompt[start])
        cover[start : start + agreed] = [-negative] * agreed
    return cover


def _check_recorded(
    trajectory: Trajectory, place: int, call: Call, inside: int, which: str
) -> None:
    given, recorded = trajectory.logprobs[place], call.logprobs[inside]
    if abs(given - recorded) > TOLERANCE * max(1.0, abs(recorded)):
        raise FunctionError(
            f"logprobs of trajectory {which} is {given:.6g} at token {place}, but the engine "
            f"sampled it with {recorded:.6g}: are logprobs and input_ids shifted against each "
            "other?"
        )
    if trajectory.versions is not None and trajectory.versions[place] != call.versions[inside]:
        raise FunctionError(
            f"versions of trajectory {which} is {trajectory.versions[place]} at token {place}, but "
            f"weights of version {call.versions[inside]} sampled it"
        )

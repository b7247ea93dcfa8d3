"""Trajectories: the checked tensors of a workflow, and the call that sampled each token.

For B trajectories, padded on the right to L tokens:

    key             shape   content
    input_ids       [B, L]  prompts, answers and everything inserted between them
    attention_mask  [B, L]  True on tokens, False on padding
    loss_mask       [B, L]  1 on sampled tokens that are to be trained, else 0
    logprobs        [B, L]  log-prob of each sampled token, 0 elsewhere
    rewards         [B]     one number for each trajectory
    versions        [B, L]  optional: version (number of updates) of the weights, -1 elsewhere

Only tokens sampled by a call are trained: a trajectory is a list of ids and a mask; the log-probs,
versions and sampling settings come from the trace. Each stretch of masked tokens is searched in the
calls of its episode:

    trajectory  q q q a a a o o b b      q prompt, a and b sampled, o inserted by the agent
    mask        0 0 0 1 1 1 0 0 1 1
    calls       q q q|a a a
                q q q a a a o o|b b

so a token that was not sampled after exactly the tokens before it cannot be trained, and one that
was sampled once cannot be trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from tuner.errors import FunctionError
from tuner.traces import Call

TOKEN_KEYS = ("input_ids", "attention_mask", "loss_mask", "logprobs")
REQUIRED_KEYS = (*TOKEN_KEYS, "rewards")
OPTIONAL_KEYS = ("versions",)

T = TypeVar("T")


@dataclass(frozen=True)
class Trajectory:
    """One row without its padding.

    Attributes:
        input_ids: Shape [L].
        loss_mask: Whether each token is to be trained, shape [L].
        logprobs: Shape [L].
        versions: Shape [L], or None if the workflow gives none.
        reward: A finite number.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...] | None
    reward: float


def read_trajectories(value: Any, source: str) -> list[Trajectory]:
    """Trajectories in a workflow's result.

    Args:
        value: A dict of the tensors above.
        source: Origin of the value, for error messages.

    Raises:
        FunctionError: A tensor is missing, unknown or of the wrong shape, lengths differ (the
            message has them), the padding is not on the right, or a number is not finite.
    """
    if not isinstance(value, Mapping):
        raise FunctionError(
            f"{source} returned {value!r:.80} ({type(value).__name__}); it must return a dict of "
            f"tensors ({', '.join(REQUIRED_KEYS)}), or None to reject the episode"
        )
    missing = [key for key in REQUIRED_KEYS if key not in value]
    unknown = [key for key in value if key not in (*REQUIRED_KEYS, *OPTIONAL_KEYS)]
    if missing or unknown:
        found = f"has no {', '.join(missing)}" if missing else f"has {', '.join(map(str, unknown))}"
        raise FunctionError(
            f"the dict that {source} returned {found}; its keys are {', '.join(REQUIRED_KEYS)} "
            f"and, if wanted, {', '.join(OPTIONAL_KEYS)}"
        )
    tensors = {key: torch.as_tensor(item).detach().cpu() for key, item in value.items()}
    _check_shapes(tensors, source)
    if not torch.isfinite(tensors["rewards"]).all():
        raise FunctionError(f"{source} returned rewards {tensors['rewards'].tolist()}: not finite")
    return [_trajectory(tensors, index, source) for index in range(len(tensors["rewards"]))]


def _check_shapes(tensors: Mapping[str, Tensor], source: str) -> None:
    flat = [key for key in (*TOKEN_KEYS, *OPTIONAL_KEYS) if key in tensors]
    shapes = {key: tuple(tensors[key].shape) for key in (*flat, "rewards")}
    wrong = [key for key in flat if len(shapes[key]) != 2] + ["rewards"] * (
        len(shapes["rewards"]) != 1
    )
    if wrong:
        found = ", ".join(f"{key} {list(shapes[key])}" for key in wrong)
        raise FunctionError(
            f"{source} returned {found}; tokens have the shape [B, L] and rewards [B]: "
            "unsqueeze(0) makes a batch of one trajectory"
        )
    lengths = {key: shapes[key][1] for key in flat}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise FunctionError(
            f"the lengths that {source} returned do not agree: {found}; every token needs one "
            "entry in each, so append each answer and each observation once to all of them"
        )
    rows = {key: shapes[key][0] for key in (*flat, "rewards")}
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{key} {count}" for key, count in rows.items())
        raise FunctionError(f"{source} returned different numbers of trajectories: {found}")


def _trajectory(tensors: Mapping[str, Tensor], index: int, source: str) -> Trajectory:
    attention_L = tensors["attention_mask"][index].bool()
    length = int(attention_L.sum())
    if not attention_L[:length].all():
        raise FunctionError(
            f"attention_mask of trajectory {index} of {source} has padding before tokens; pad on "
            "the right (concat_padded_tensors does)"
        )
    mask_L = tensors["loss_mask"][index].bool()
    if mask_L[length:].any():
        raise FunctionError(
            f"loss_mask of trajectory {index} of {source} is 1 on padding: {int(mask_L.sum())} "
            f"tokens to train, the last of them after the {length} of attention_mask"
        )
    logprobs_L = tensors["logprobs"][index, :length].double()
    if not torch.isfinite(logprobs_L).all():
        place = int((~torch.isfinite(logprobs_L)).nonzero()[0])
        raise FunctionError(
            f"logprobs of trajectory {index} of {source} is {float(logprobs_L[place])} at token "
            f"{place}: not finite"
        )
    versions = tensors.get("versions")
    return Trajectory(
        input_ids=tuple(tensors["input_ids"][index, :length].tolist()),
        loss_mask=tuple(mask_L[:length].tolist()),
        logprobs=tuple(logprobs_L.tolist()),
        versions=None if versions is None else tuple(versions[index, :length].tolist()),
        reward=float(tensors["rewards"][index]),
    )


def concat_padded_tensors(
    tensor_dicts: Sequence[Mapping[str, Tensor] | None], pad_value: float = 0.0
) -> dict[str, Tensor] | None:
    """Several dicts of trajectories as one, padded on the right to the longest.

    An episode of None was rejected and is skipped; returns None if all are.

    Args:
        tensor_dicts: With the same keys; tensors of shape [B_i, L_i, ...], or [B_i].
        pad_value: Value of padding; `attention_mask` and `loss_mask` are always padded with 0,
            `versions` with -1.

    Raises:
        FunctionError: There are no dicts, or their keys differ.
    """
    if not tensor_dicts:
        raise FunctionError("concat_padded_tensors was given no trajectories")
    dicts = [tensors for tensors in tensor_dicts if tensors is not None]
    if not dicts:
        return None
    keys = list(dicts[0])
    for index, tensors in enumerate(dicts):
        if set(tensors) != set(keys):
            raise FunctionError(
                f"concat_padded_tensors: dict 0 has the keys {', '.join(keys)}, dict {index} has "
                f"{', '.join(tensors)}; all of them need the same keys"
            )
    return {key: _padded(key, [d[key] for d in dicts], pad_value) for key in keys}


def _padded(key: str, tensors: Sequence[Tensor], pad_value: float) -> Tensor:
    if tensors[0].dim() < 2:
        return torch.cat(list(tensors))
    longest = torch.tensor([tensor.shape[1:] for tensor in tensors]).amax(0).tolist()
    fills = {"attention_mask": 0.0, "loss_mask": 0.0, "versions": -1.0, "kept": 0.0}
    wide = []
    for tensor in tensors:
        filled = tensor.new_full((tensor.shape[0], *longest), fills.get(key, pad_value))
        filled[tuple(map(slice, tensor.shape))] = tensor
        wide.append(filled)
    return torch.cat(wide)


def tensor_container_to(container: T, device: torch.device | str) -> T:
    """A copy of a dict, list, tuple or tensor with every tensor in it on `device`."""
    if isinstance(container, Tensor):
        return container.to(device)  # type: ignore[return-value]
    if isinstance(container, dict):
        moved = {key: tensor_container_to(item, device) for key, item in container.items()}
        copy: Any = getattr(container, "with_tensors", dict)
        return copy(moved)  # type: ignore[no-any-return]
    if isinstance(container, (list, tuple)):
        items = [tensor_container_to(item, device) for item in container]
        return type(container)(items)
    return container


# The log-probs came through a float32 tensor.
TOLERANCE = 1e-4


Owners: TypeAlias = tuple[tuple[int | None, ...], ...]
"""The call that sampled each token of each trajectory, by number, None for untrained tokens;
shape [L] each."""


def settle(
    trajectories: Sequence[Trajectory], calls: Sequence[Call], source: str
) -> tuple[Owners, tuple[tuple[int, frozenset[int]] | None, ...]]:
    """Find every trained token among the calls.

    If two calls sampled the same tokens after the same prompt, each trajectory gets one of them. If
    trajectories share a call, the first one trains it.

    Returns:
        The owners; and for each call the trajectory that trains it with the trained positions in
            its
        completion, None for a call that no trajectory trains.

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
    return tuple(owners), tuple(trained)


def _cover(
    trajectory: Trajectory, calls: Sequence[Call], taken: frozenset[int]
) -> list[int | None]:
    """The call that may have sampled each token: the one with the longest prompt, then the one with
    the longest match, then one that is not taken."""
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
            f"sampled it with {recorded:.6g}: check whether logprobs and input_ids are shifted "
            "against each other"
        )
    if trajectory.versions is not None and trajectory.versions[place] != call.versions[inside]:
        raise FunctionError(
            f"versions of trajectory {which} is {trajectory.versions[place]} at token {place}, but "
            f"weights of version {call.versions[inside]} sampled it"
        )

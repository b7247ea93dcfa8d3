"""The dict of tensors of an explicit training loop, and its conversion to the trainer's batch.

In addition to the keys of `tuner.areal.trajectories`, for B trajectories:

    key           shape   content
    temperatures  [B, L]  sampling settings of each trained token; `top_ps`, `top_ks` and `min_ps`
                          likewise
    kept          [B, L, W]  optional: the vocabulary kept by these (`Call.kept`), in bytes,
                          padded with 0
    calls         [B, L]  optional: number of the call of its rollout that sampled each trained
        token
    rollout_ids   [B]     the trajectory's rollout; a rollout counts once in its group
    group_ids     [B]     the rollout's group; rewards are compared inside a group
    prox_logp     [B, L]  set by the user: log-probs of the weights at the start of the step
    advantages    [B, L]  set by `compute_advantages`
    ref_logp      [B, L]  set by `compute_advantages`, if KL is subtracted from the rewards
    values        [B, L]  set by `compute_advantages`, if there is a critic
    returns       [B, L]  likewise: the critic's targets

A trajectory with several trained stretches is one row for each of them (`tuner.training.batch`):
exactly the sampled calls, whose common prefixes the token tree computes once. Without `calls` each
stretch is taken for a call. A trajectory's reward is gained at the end of its last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tuner.engines.base import SamplingParams
from tuner.errors import TrainingError
from tuner.gateway import SamplingDefaults
from tuner.traces import RolloutId, Trace
from tuner.training.batch import Batch, Row, Selection

SAMPLING_KEYS: dict[str, tuple[str, type[float]]] = {
    "temperatures": ("temperature", float),
    "top_ps": ("top_p", float),
    "top_ks": ("top_k", int),
    "min_ps": ("min_p", float),
}


@dataclass(frozen=True)
class Account:
    """Use of all tokens sampled for a batch.

    Attributes:
        sampled: Number of sampled tokens, in all attempts.
        dropped: Number of sampled tokens that are not in the batch's mask, by reason.
        outcomes: Number of rollouts by outcome, and of rollouts in dropped groups by reason.
        errors: One line for each failed rollout.
    """

    sampled: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    def __add__(self, other: Account) -> Account:
        return Account(
            self.sampled + other.sampled,
            dict(sorted((Counter(self.dropped) + Counter(other.dropped)).items())),
            dict(sorted((Counter(self.outcomes) + Counter(other.outcomes)).items())),
            self.errors + other.errors,
        )


class TrajectoryBatch(dict[str, Tensor]):
    """Tensors by key, with the account of the tokens sampled for them.

    Attributes:
        account: Use of all sampled tokens.
        traces: Every attempt, for people.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        account: Account | None = None,
        traces: Sequence[Trace] = (),
    ) -> None:
        super().__init__(tensors)
        self.account = account or Account()
        self.traces = tuple(traces)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> TrajectoryBatch:
        """The same batch with other tensors."""
        return TrajectoryBatch(tensors, self.account, self.traces)


@dataclass(frozen=True)
class Place:
    """Position of a row: trajectory `row`, tokens [start, stop)."""

    row: int
    start: int
    stop: int


def to_batch(
    tensors: Mapping[str, Tensor], selection: Selection, default: SamplingDefaults
) -> tuple[Batch, tuple[Place, ...]]:
    """The trainer's batch, and the position of each of its rows.

    Groups of one rollout are dropped and counted, unless the algorithm compares nothing inside a
    group. If the trajectories of one rollout have different rewards, every trajectory of its group
    is compared by its own.

    Args:
        selection: Conversion of rewards.
        default: Sampling settings of tokens for which the tensors have none.

    Raises:
        TrainingError: A tensor is missing or of the wrong shape, or more is masked than was
            sampled.
    """
    _check(tensors)
    values = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
    rollouts, rewards = values["rollout_ids"].tolist(), values["rewards"].double().tolist()
    groups = values["group_ids"].tolist()
    stretches = list(_stretches(values))
    voters = {rollouts[place.row] for place in stretches}  # the others have nothing to train
    members: dict[int, dict[int, list[float]]] = {}
    for rollout, group, reward in zip(rollouts, groups, rewards, strict=True):
        if rollout in voters:
            members.setdefault(group, {}).setdefault(rollout, []).append(reward)
    least = 2 if selection.needs_group else 1
    used = {group: found for group, found in members.items() if len(found) >= least}
    own = {g for g, found in used.items() if any(len(set(r)) > 1 for r in found.values())}
    index = {r: i for i, r in enumerate(r for found in used.values() for r in found)}
    group_index = {group: i for i, group in enumerate(used)}
    rows: list[Row] = []
    places: list[Place] = []
    dropped: Counter[str] = Counter()
    last = {place.row: place for place in stretches}
    for place in stretches:
        group, rollout = groups[place.row], rollouts[place.row]
        if group not in used:
            dropped["group_of_one"] += place.stop - place.start
            continue
        shaped = selection.of_call(rewards[place.row])
        rows.append(
            replace(
                _row(values, place, index[rollout], default),
                reward=shaped if group in own else None,
                peers=group_index[group] if group in own else None,
                gained=shaped if last[place.row] == place else 0.0,
            )
        )
        places.append(place)
    means = [sum(r) / len(r) for found in used.values() for r in found.values()]
    account = getattr(tensors, "account", None) or Account()
    trained = sum(len(row.completion_ids) for row in rows)
    sampled = account.sampled or trained + dropped.total()
    dropped.update(account.dropped)
    unmasked = sampled - trained - dropped.total()
    if unmasked < 0:
        raise TrainingError(
            f"loss_mask trains {trained} tokens and {dropped.total()} were dropped "
            f"({dict(dropped)}), but only {sampled} were sampled: a token is trained once, so do "
            "not add trajectories, or ones to the mask"
        )
    if unmasked:
        dropped["masked"] += unmasked  # by the user, since the batch was collected
    batch = Batch(
        rows=tuple(rows),
        rewards_R=torch.tensor([selection.of_call(mean) for mean in means], dtype=torch.float64),
        group_R=torch.tensor([group_index[g] for g in used for _ in used[g]], dtype=torch.long),
        ids=tuple(RolloutId(1, group_index[g], r) for g in used for r in used[g]),
        sampled_tokens=sampled,
        dropped_tokens=dict(sorted(dropped.items())),
        dropped_rollouts={k: v for k, v in account.outcomes.items() if k != "completed"},
    )
    return batch, tuple(places)


def scattered(values: Sequence[Tensor], places: Sequence[Place], input_ids: Tensor) -> Tensor:
    """Put one value for each trained token at the token's position; 0 elsewhere. Shape [B, L]."""
    result = torch.zeros_like(input_ids, dtype=torch.float32)
    for value_T, place in zip(values, places, strict=True):
        result[place.row, place.start : place.stop] = value_T.to(result)
    return result


def gathered(values: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
    """Inverse of `scattered`: one tensor [T] for each row."""
    return tuple(values[place.row, place.start : place.stop] for place in places)


def _check(tensors: Mapping[str, Any]) -> None:
    required = ("input_ids", "attention_mask", "loss_mask", "logprobs")
    missing = [k for k in (*required, "rewards", "rollout_ids", "group_ids") if k not in tensors]
    if missing:
        raise TrainingError(
            f"the batch has no {', '.join(missing)}; use batches from rollout_batch or "
            "prepare_batch, which define the trajectories that are compared with each other"
        )
    shape = tensors["input_ids"].shape
    for key, tensor in tensors.items():
        wanted = shape if tensor.dim() >= 2 else shape[:1]
        if tensor.shape[:2] != wanted:
            raise TrainingError(
                f"the batch's {key} has the shape {list(tensor.shape)}, which does not fit "
                f"input_ids {list(shape)}"
            )


def _stretches(values: Mapping[str, Tensor]) -> Iterator[Place]:
    """Trained stretches of tokens that were sampled with the same settings."""
    mask = values["loss_mask"].bool() & values["attention_mask"].bool()
    mask[:, 0] = False  # nothing comes before the first token
    settings = [values[key] for key in (*SAMPLING_KEYS, "calls") if key in values]
    for row in range(mask.shape[0]):
        found: list[list[int]] = []  # [start, stop) each
        for place in mask[row].nonzero()[:, 0].tolist():
            alike = found and not any(s[row, place] != s[row, found[-1][0]] for s in settings)
            if found and found[-1][1] == place and alike:
                found[-1][1] = place + 1
            else:
                found.append([place, place + 1])
        for start, stop in found:
            yield Place(row, start, stop)


def _row(
    values: Mapping[str, Tensor], place: Place, rollout: int, default: SamplingDefaults
) -> Row:
    """A row, from the tensors themselves."""
    row, start, stop = place.row, place.start, place.stop
    sampling: dict[str, Any] = {
        name: kind(values[key][row, start])
        if key in values
        else getattr(default, name, getattr(SamplingParams, name, None))
        for key, (name, kind) in SAMPLING_KEYS.items()
    }
    kept = []
    if "kept" in values:
        packed = values["kept"][row, start:stop].numpy()
        kept = [one.tobytes().rstrip(b"\0").decode() for one in packed]
    versions = values["versions"][row, start:stop].tolist() if "versions" in values else ()
    ids = values["input_ids"][row, :stop].tolist()
    call = f"call-{int(values['calls'][row, start])}" if "calls" in values else f"{row}-{start}"
    return Row(
        call_id=call,
        rollout=rollout,
        prompt_ids=tuple(ids[:start]),
        completion_ids=tuple(ids[start:]),
        logprobs=tuple(values["logprobs"][row, start:stop].double().tolist()),
        sampling=SamplingParams(max_tokens=stop - start, **sampling),
        versions=tuple(versions),
        kept=tuple(kept) if any(kept) else (),
    )

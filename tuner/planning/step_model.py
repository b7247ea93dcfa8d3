"""Seconds of a step, from what its rollouts come to (`Work`), costs (`Costs`) and places (`Place`).

Rollouts go in circles: the agent asks (its code and the gateway take CPU), the engine answers, a
tool or another service is waited for. With `running` rollouts at a time over `engines` engines, one
circle is, with B answers in an engine's pass (a closed queue with one station):

    circle = waits + A + B D
    B      = running / engines x (circle - waits) / circle, at most slots
    A      = tokens x step: a pass costs this whatever is in it
    D      = tokens x (sampled + attended x context) + new prompt tokens x prefilled

which is a quadratic equation. An engine in the trainer's process is stepped on the loop that agents
and gateway run on: what these take is then in D and held up by all. Else it is among what is waited
for, and gateway and workers are stations of their own, the slowest of which sets the pace:

    collection = max(circles of all rollouts + tail, gateways, workers, all CPU / cores)
    tail       = how much longer the longest of those that run together is than the mean
    training   = update + unique tokens x (trained + paired x depth) x passes / trainers
    step       = collection + training - overlap + weights + rest

`overlap` is 0 where collection and training take turns; with `ahead` it is the shorter of them,
less what both need of one device, of one process's arithmetic or of the cores. All seconds are of
the clock, those of CPU too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

REFERENCE = 1 / 3
"""A forward pass of the reference, of an update's forward and backward pass."""
Overlap = Literal["apart", "cpu", "device"]


@dataclass(frozen=True)
class Work:
    """What a rollout comes to, in the mean.

    Attributes:
        calls: Of the model.
        completion: Tokens sampled in a call.
        prompt: Tokens of a call's prompt.
        reused: Of these, those whose keys and values the engine had.
        common: Tokens that all prompts of a step begin with.
        first: Further tokens of a task's first prompt, which its rollouts share.
        own: Further tokens that a rollout adds to the token tree of a step.
        depth: Tokens that one of the tree attends to.
        waits: Seconds for each call in which the agent waits for something that takes no CPU here.
        judged: Seconds for each rollout in which it waits for its judge so.
        spread: Sampled tokens of rollouts over their mean, rising.
    """

    calls: float
    completion: float
    prompt: float
    reused: float = 0.0
    common: float = 0.0
    first: float = 0.0
    own: float = 0.0
    depth: float = 0.0
    waits: float = 0.0
    judged: float = 0.0
    spread: tuple[float, ...] = (1.0,)

    @property
    def context(self) -> float:
        """Tokens before a sampled one, in the mean."""
        return self.prompt + self.completion / 2

    @property
    def new(self) -> float:
        """Tokens of a call's prompt that the engine has to compute."""
        return self.prompt - self.reused

    def longest(self, count: float) -> float:
        """The longest of `count` rollouts, in the mean of all draws, over the mean rollout."""
        if not self.spread:
            return 1.0
        draws, size = max(1.0, count), len(self.spread)
        return math.fsum(
            value * (((place + 1) / size) ** draws - (place / size) ** draws)
            for place, value in enumerate(self.spread)
        )

    def unique(self, groups: int, repeat: int) -> float:
        """Tokens of a step's tree."""
        return self.common + groups * (self.first + repeat * self.own)


@dataclass(frozen=True)
class Costs:
    """Seconds of one of each on one engine, one core, one trainer.

    Attributes:
        step: Of a pass in which each answer gets a token, whatever is in it.
        sampled: Of a token in it.
        attended: Of a token in it for each token before it.
        prefilled: Of a token of a prompt.
        gateway: Of a call in the gateway, CPU.
        agent: Of a call in the agent's own code, CPU.
        rollout: Of a rollout: its session, judge and record, CPU.
        update: Of an update, whatever is in it.
        trained: Of a token of the tree, forward and backward.
        paired: Of such a token for each token that it attends to.
        publish: Of giving the engines the weights.
        rest: Of what else a step does; not its evaluation and its checkpoint.
    """

    step: float = 0.0
    sampled: float = 0.0
    attended: float = 0.0
    prefilled: float = 0.0
    gateway: float = 0.0
    agent: float = 0.0
    rollout: float = 0.0
    update: float = 0.0
    trained: float = 0.0
    paired: float = 0.0
    publish: float = 0.0
    rest: float = 0.0


NAMES = tuple(field.name for field in fields(Costs))


@dataclass(frozen=True)
class Place:
    """What runs where.

    Attributes:
        groups, repeat: Tasks in a step, and rollouts of each.
        running: Rollouts at a time.
        slots: Answers generated together by one engine.
        ahead: Steps by which collection may run ahead of training.
        reference: Whether a reference is asked in each update.
        engines: Engines beside each other, each with weights of its own.
        trainers: GPUs that train, as times the speed of one.
        in_process: Whether the engine's steps run on the loop of agents and gateway.
        workers: Processes that run agents and judges; 0: they run on the gateway's loop.
        gateways: Processes that each are a gateway.
        cores: Cores, of all machines.
        shared: What both trainer and engine need, and so cannot have at the same time: nothing
            ("apart"), the cores ("cpu"), or one GPU ("device").
    """

    groups: int
    repeat: int
    running: int
    slots: int = 64
    ahead: int = 0
    reference: bool = False
    engines: int = 1
    trainers: float = 1.0
    in_process: bool = True
    workers: int = 0
    gateways: int = 1
    cores: int = 1
    shared: Overlap = "cpu"

    @property
    def rollouts(self) -> int:
        return self.groups * self.repeat

    @property
    def at_once(self) -> int:
        """Rollouts that really run at a time: no more than are begun ahead."""
        return min(self.running, self.rollouts * (self.ahead + 1))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part.

    Attributes:
        parts: Of these the step is the sum: those of collection, then training, overlap (at most
            0), weights, rest. Of collection it is what its slowest station does, and `waiting`.
        busy: Seconds for which each station is busy in a step, whether or not it sets the pace.
        batch: Answers in a pass of an engine, in the mean.
        unique: Tokens of the tree.
    """

    parts: Mapping[str, float]
    busy: Mapping[str, float]
    batch: float
    unique: float

    @property
    def collection(self) -> float:
        names = ("generation", "gateway", "agent", "rollouts", "waiting")
        return sum(self.parts.get(name, 0.0) for name in names)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The part that takes longest; where collection and training overlap, of the longer."""
        trains = self.parts["training"]
        if self.parts["overlap"] < 0 and trains >= self.collection:
            return "training"
        shown = {name: s for name, s in self.parts.items() if name != "overlap"}
        if self.parts["overlap"] < 0:
            del shown["training"]
        return max(shown, key=lambda name: shown[name])


def predict(work: Work, costs: Costs, place: Place) -> StepTime:
    """Seconds of a step.

    Args:
        work: What a rollout comes to.
        costs: Of this model on these devices.
        place: What runs where.
    """
    circle = _circle(work, costs, place)
    rollouts, calls = place.rollouts, place.rollouts * work.calls
    batch = circle.batch
    passes = calls * work.completion / batch
    tail = 0.0
    if not place.ahead:
        longer = work.longest(min(place.at_once, rollouts)) - 1
        passes += longer * work.calls * work.completion * place.engines
        tail = longer * (work.calls * (circle.alone + circle.waits))
    engine = passes * costs.step + calls * _of_call(work, costs)
    parts = {
        "generation": engine / place.engines,
        "gateway": calls * costs.gateway / place.gateways,
        "agent": calls * costs.agent,
        "rollouts": rollouts * costs.rollout,
    }
    begun = calls * circle.seconds / place.at_once + tail
    collection, stations = _stations(parts, begun, place)
    shown = _paced(parts, collection, stations)
    unique = work.unique(place.groups, place.repeat)
    asked = 1 + REFERENCE * place.reference
    each = costs.trained + costs.paired * work.depth
    training = costs.update + unique * each * asked / place.trainers
    return StepTime(
        parts={
            **shown,
            "training": training,
            "overlap": -_overlap(parts, collection, training, place),
            "weights": costs.publish,
            "rest": costs.rest,
        },
        busy={**{name: sum(of.values()) for name, of in stations.items()}, "trainer": training},
        batch=batch,
        unique=unique,
    )


@dataclass(frozen=True)
class _Circle:
    """One call of each rollout that runs.

    Attributes:
        seconds: From one call of a rollout to its next.
        batch: Answers in a pass.
        alone: Seconds of passes that an answer is in, were it alone in them and free.
        waits: Seconds outside the engine.
    """

    seconds: float
    batch: float
    alone: float
    waits: float


def _of_call(work: Work, costs: Costs) -> float:
    """What a call adds to the passes that it is in, and its prompt."""
    token = costs.sampled + costs.attended * work.context
    return work.completion * token + work.new * costs.prefilled


def _circle(work: Work, costs: Costs, place: Place) -> _Circle:
    alone, added = work.completion * costs.step, _of_call(work, costs)
    on_loop = costs.gateway + costs.rollout / work.calls
    elsewhere = costs.agent if place.workers else 0.0
    on_loop += costs.agent - elsewhere
    waits = work.waits + work.judged / work.calls + elsewhere
    if place.in_process:
        added += on_loop
    else:
        waits += on_loop
    mine = place.at_once / place.engines
    slots = max(1.0, min(place.slots, mine))
    # x = alone + mine x / (x + waits) added
    ahead = alone + mine * added - waits
    x = (ahead + math.sqrt(ahead * ahead + 4 * alone * waits)) / 2
    seconds = waits + x
    batch = mine * x / seconds if seconds else slots
    if batch > slots or not seconds:
        batch = slots
        seconds = max(waits + alone + slots * added, mine * (alone / slots + added))
    return _Circle(seconds, max(batch, min(1.0, mine)), alone, waits)


def _stations(
    parts: Mapping[str, float], begun: float, place: Place
) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds until the slowest station is done, and what each is busy with."""
    served = ("agent", "rollouts") if place.workers and place.gateways > 1 else ("agent",)
    loop = {name: parts[name] for name in ("gateway", "agent", "rollouts")}
    stations: dict[str, dict[str, float]] = {}
    if place.workers:
        spread = min(place.workers, place.cores)
        stations["workers"] = {name: loop.pop(name) / spread for name in served}
    engine = {"generation": parts["generation"]}
    if place.in_process:
        stations["loop and engine"] = engine | loop
    else:
        stations |= {"engines": engine, "gateway": loop}
    cpu = sum(parts[name] for name in ("agent", "rollouts")) + parts["gateway"] * place.gateways
    if place.shared == "cpu":
        cpu += parts["generation"] * place.engines
    slowest = max(sum(of.values()) for of in stations.values())
    return max(begun, slowest, cpu / place.cores), stations


def _paced(
    parts: Mapping[str, float], collection: float, stations: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Collection as what its slowest station does and what is waited for beyond that."""
    slowest = max(stations.values(), key=lambda of: sum(of.values()))
    shown = {name: slowest.get(name, 0.0) for name in parts}
    return shown | {"waiting": max(0.0, collection - sum(shown.values()))}


def _overlap(parts: Mapping[str, float], collection: float, training: float, place: Place) -> float:
    """Seconds in which both go on, where collection runs ahead."""
    if not place.ahead:
        return 0.0
    least = max(collection, training)
    if place.shared == "device":
        least = max(least, parts["generation"] + training)
    elif place.shared == "cpu":
        cores = (sum(parts.values()) + training) / place.cores
        # Both are computed in one process: an update beside generation takes twice as long
        # (benchmarks/results/async.json).
        arithmetic = parts["generation"] + training if place.in_process else 0.0
        least = max(least, cores, arithmetic)
    return max(0.0, collection + training - least)


@dataclass(frozen=True)
class Change:
    """Something that can be bought or set, and what a step then takes.

    Attributes:
        what: In words, with the setting.
        place: With it.
        time: With it.
    """

    what: str
    place: Place
    time: StepTime


def changes(
    work: Work, costs: Costs, place: Place, wanted: Sequence[tuple[str, Mapping[str, object]]]
) -> list[Change]:
    """Each change alone, those that save most first; those that save less than 3 % are left out."""
    now = predict(work, costs, place).seconds
    found = []
    for what, fields_of in wanted:
        other = replace(place, **fields_of)  # type: ignore[arg-type]
        found.append(Change(what, other, predict(work, costs, other)))
    better = [one for one in found if one.time.seconds < 0.97 * now]
    return sorted(better, key=lambda one: one.time.seconds)

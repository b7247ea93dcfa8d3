"""Whole updates on token trees, packed and padded rows are those of one row per call.

For every algorithm of the table: on random agents, and on recorded traces with a grammar, answers
that were sampled together, a sub-agent, a rewritten history, temperature and top_p.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.models import VOCABULARY, change_weights
from tests.kit.builders import call, trace
from tests.kit.examples import grid
from tests.traces.agents import rollouts
from tests.training.configured import changed, training
from tests.training.exact import (
    KINDS,
    SAMPLINGS,
    assert_same_update,
    model_of,
    precision,
    small_parts,
)
from tests.training.recorded import recorded
from tests.training.test_algorithms import REWARDED, settings_of
from tuner.config import RunConfig, load_config
from tuner.config.algorithms import EntropyLoss
from tuner.runs.stack import selection
from tuner.training.batch import Batch, build_batch
from tuner.training.trainer import PolicyTrainer


def settings_with_entropy(algorithm: str) -> RunConfig:
    return changed(settings_of(algorithm), entropy=EntropyLoss(entropy_coef=0.01))


def batch_of(algorithm: str, traces) -> Batch:
    config = load_config(overrides=[f"algorithm.algorithm_type={algorithm}"])
    return build_batch(traces, selection=selection(config))


def reference_of(model_kind: str, dtype):
    model = model_of(model_kind, dtype)
    change_weights(model, 0.1)
    return model


@grid("algorithm", REWARDED, quick=4)
def test_updates_on_random_agents(algorithm: str) -> None:
    """Off policy, and with a forward pass for the log-probs that the step began with."""
    shapes = {}

    def models_of(kind):
        if kind not in shapes:
            dtype, _ = precision(kind)
            shapes[kind] = model_of(kind, dtype), reference_of(kind, dtype)
        return shapes[kind]

    @settings(max_examples=2, deadline=None, derandomize=True)
    @given(
        agents=st.lists(rollouts(max_calls=4), min_size=4, max_size=4),
        kind=st.sampled_from(KINDS),
        dice=st.randoms(use_true_random=False),
    )
    def check(agents, kind, dice):
        model, reference = models_of(kind)
        traces = [
            trace(
                i // 2,
                i,
                [
                    replace(
                        call(
                            f"{i}-{n}",
                            [id_ % VOCABULARY for id_ in ids.prompt_ids],
                            [id_ % VOCABULARY for id_ in ids.completion_ids],
                            [-5.0] * len(ids.completion_ids),
                        ),
                        sampling=dice.choice(SAMPLINGS),
                    )
                    for n, ids in enumerate(agent)
                    if ids.prompt_ids and ids.completion_ids
                ],
                reward=dice.random(),
            )
            for i, agent in enumerate(agents)
        ]
        batch = batch_of(algorithm, traces)
        if not batch.rows:
            return
        exact = PolicyTrainer(model, training(total_steps=1, kl="none")).compute_logp(batch)
        rows = [
            replace(row, logprobs=tuple(float(p) + dice.gauss(0, 0.2) for p in logp))
            for row, logp in zip(batch.rows, exact, strict=True)
        ]
        some = dice.randrange(1, 40)
        with small_parts():
            assert_same_update(
                model,
                replace(batch, rows=tuple(rows)),
                settings_with_entropy(algorithm),
                cuts=[("tree", 10_000), ("tree", some), ("packed", some), ("padded", some)],
                tolerance=precision(kind)[1],
                reference=reference,
                step=1,
            )

    check()


@grid("algorithm, kind", list(zip(REWARDED, itertools.cycle([*KINDS, "tiny_math"]))), quick=2)
def test_updates_on_traces_of_a_tool_agent(algorithm: str, kind: str) -> None:
    """On policy, in float64; the shipped model in float32."""
    found = recorded(kind)
    calls = [call for one in found.traces for call in one.calls]
    assert all(call.invalid is None for call in calls)
    assert {bool(call.sampling.grammar) for call in calls} == {False, True}
    dtype, tolerance = (torch.float32, 1e-5) if kind == "tiny_math" else precision(kind)
    wanted = assert_same_update(
        found.model if kind == "tiny_math" else model_of(kind, dtype),
        batch_of(algorithm, found.traces),
        settings_with_entropy(algorithm),
        cuts=[("tree", 10_000), ("tree", 250), ("packed", 10_000)],
        tolerance=tolerance,
        reference=None if kind == "tiny_math" else reference_of(kind, dtype),
        grammars=found.grammars,
    )
    assert wanted.gradient.norm() > 0
    assert wanted.metrics["logprob_mismatch_max"] < 1e-4

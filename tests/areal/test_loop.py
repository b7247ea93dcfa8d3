"""The loop in the open: the notebook's cell, versions, pausing, what is refused."""

import asyncio
from itertools import cycle

import pytest

from tests.areal.loop import GCONFIG, ROWS, Random, step
from tests.areal.seed_search import GroupedSearchAgentWorkflow, SearchAgentWorkflow
from tests.areal.test_tokens import Twice
from tuner.areal import (
    AllocationMode,
    FinetuneSpec,
    GenerationHyperparameters,
    GRPOConfig,
    PPOActor,
    RolloutEngine,
    Run,
    StatefulDataLoader,
    WeightUpdateMeta,
    concat_padded_tensors,
    tensor_container_to,
)
from tuner.errors import ConfigError, FunctionError, TrainingError


def test_the_seeds_last_cell_runs(random_model_path):
    # Names as in the notebook; only their imports differ.
    from tuner.areal import PPOActor as FSDPPPOActor
    from tuner.areal import RolloutEngine as RemoteSGLangEngine

    config = GRPOConfig()
    config.actor.path = str(random_model_path)
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize()
    dataloader = StatefulDataLoader(
        ROWS, batch_size=2, shuffle=True, collate_fn=lambda x: x, drop_last=True
    )
    data_generator = cycle(dataloader)
    ft_spec = FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=len(dataloader) * 2,
        train_batch_size=2,
    )
    # Every sample is a success or a failure by its first token, where the notebook's is by F1.
    workflow = GroupedSearchAgentWorkflow(
        gconfig=GenerationHyperparameters(max_new_tokens=5, stop=["</answer>", "</search>"]),
        tokenizer=rollout.tokenizer,
        max_tokens=64,
        max_turns=2,
        group_size=4,
        verbose=False,
    )
    actor = FSDPPPOActor(config=config.actor)
    actor.initialize(None, ft_spec)

    weight_update_meta = WeightUpdateMeta.from_fsdp_xccl(
        AllocationMode.from_str("sglang:d1p1t1+d1p1t1")
    )

    for global_step in range(2):
        batch = rollout.rollout_batch(next(data_generator), workflow=workflow)
        batch = tensor_container_to(batch, actor.device)

        logp = actor.compute_logp(batch)
        batch["prox_logp"] = logp

        actor.compute_advantages(batch)

        actor.ppo_update(batch)
        actor.step_lr_scheduler()

        rollout.pause()
        actor.update_weights(weight_update_meta)
        rollout.resume()

        actor.set_version(global_step + 1)
        rollout.set_version(global_step + 1)
    rollout.destroy()
    assert actor.get_version() == rollout.get_version() == 2
    config.actor.run.close()


async def test_the_seeds_workflow_can_be_tried_with_the_engine_alone(make_loop):
    _, rollout = make_loop()
    workflow = SearchAgentWorkflow(GCONFIG, rollout.tokenizer, 64, 2, verbose=False)
    found = await asyncio.gather(*[workflow.arun_episode(rollout, row) for row in ROWS[:2]])
    joined = concat_padded_tensors(found)
    assert joined["input_ids"].shape == joined["logprobs"].shape
    # In a notebook the loop's plain verbs are called where an event loop is running.
    batch = rollout.rollout_batch(ROWS[:1], Random(), group_size=2)
    assert batch["rewards"].shape == (2,)


def test_generation_waits_for_nobody_who_will_not_come(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    with pytest.raises(TrainingError, match=r"call actor.update_weights"):
        rollout.rollout_batch(ROWS[:1], Random(), group_size=2)
    actor.update_weights()
    rollout.pause()
    with pytest.raises(TrainingError, match=r"call resume\(\)"):
        rollout.prepare_batch(StatefulDataLoader(ROWS, 2), Random(), group_size=2)
    rollout.resume()
    fresh = rollout.rollout_batch(ROWS[:1], Random(), group_size=2)
    assert set(fresh["versions"][fresh["loss_mask"].bool()].tolist()) == {1}


def test_versions_count_updates(make_loop):
    actor, rollout = make_loop()
    step(actor, rollout.rollout_batch(ROWS[:2], Random(), group_size=2))
    actor.set_version(1)
    rollout.set_version(1)
    for side in (actor, rollout):
        with pytest.raises(TrainingError, match=r"set_version\(5\).*1 updates"):
            side.set_version(5)


def test_a_programs_mistake_comes_out_of_the_verb(make_loop):
    _, rollout = make_loop()
    with pytest.raises(FunctionError, match="train the same call"):
        rollout.rollout_batch(ROWS[:2], Twice(0, 1), group_size=2)
    with pytest.raises(FunctionError, match="is not a workflow"):
        rollout.rollout_batch(ROWS[:2], object())


def test_a_workflow_may_not_wait_for_workflows(make_loop):
    _actor, rollout = make_loop()

    class Nested(Random):
        async def arun_episode(self, engine, data):
            rollout.rollout_batch(ROWS[:1], Random(), group_size=2)

    with pytest.raises(TrainingError, match="a workflow called a function of the training loop"):
        rollout.rollout_batch(ROWS[:1], Nested(), group_size=2)


@pytest.mark.parametrize("text", ["sglang:d4p1t1+d1p1t1", "sglang", "d1p1t1+fsdp:d2"])
def test_an_allocation_of_more_than_one_device_is_refused(text):
    with pytest.raises(ConfigError, match="allocation"):
        AllocationMode.from_str(text)


def test_what_is_not_ready_says_so(make_loop):
    config = GRPOConfig()
    with pytest.raises(ConfigError, match="the actor is not initialized"):
        PPOActor(config.actor).step_lr_scheduler()
    with pytest.raises(ConfigError, match="belongs to no configuration"):
        PPOActor(type(config.actor)())
    for part in (PPOActor(config.actor), RolloutEngine(config.rollout)):
        with pytest.raises(ConfigError, match="addr is 'localhost:1'"):
            part.initialize("localhost:1")
    config.actor.optimizer.lr_scheduler_type = "cosine"
    with pytest.raises(ConfigError, match="pass initialize"):
        PPOActor(config.actor).initialize()


def test_a_run_of_the_yaml_can_be_looped_too(random_model_path):
    from tuner.config import load_config

    run = Run(load_config(None, settings={"model": {"model_path": str(random_model_path)}}))
    actor, rollout = PPOActor(run), RolloutEngine(run)
    actor.initialize()
    assert step(actor, rollout.rollout_batch(ROWS[:2], Random(), group_size=2))["lr"] == 1e-6
    run.close()


@pytest.mark.parametrize(
    "setting",
    [
        {"tuner": {"on_failure": "abort"}},
        {"tuner": {"on_failure": {"penalize": -1.0}}},
        {"tuner": {"algorithm": {"overlong_buffer": 3}}},
        {"algorithm": {"algorithm_type": "gigpo"}},
    ],
)
def test_settings_without_effect_here_are_refused(setting):
    config = GRPOConfig(gconfig=GCONFIG, tuner=setting)
    with pytest.raises(ConfigError, match=r"an explicit training loop"):
        RolloutEngine(config.rollout).initialize()

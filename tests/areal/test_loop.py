"""The loop in the open: batches, the actor's verbs, versions, pausing, going on after a kill."""

import asyncio
import json
from itertools import cycle

import pytest
import torch

from tests.areal.seed_search import GroupedSearchAgentWorkflow, SearchAgentWorkflow
from tests.areal.test_tokens import PROMPT, Twice, TwoTurns, single
from tuner.areal import (
    AllocationMode,
    FinetuneSpec,
    GenerationHyperparameters,
    GRPOConfig,
    ModelRequest,
    PPOActor,
    RolloutEngine,
    Run,
    StatefulDataLoader,
    WeightUpdateMeta,
    concat_padded_tensors,
    tensor_container_to,
)
from tuner.areal.batch import to_batch
from tuner.engines import SamplingParams
from tuner.errors import ConfigError, DatasetError, FunctionError, TrainingError
from tuner.rollout.staleness import admissible
from tuner.training import PolicyTrainer, Selection, build_batch
from tuner.workflow import WorkflowOutput

GCONFIG = GenerationHyperparameters(max_new_tokens=5)
ROWS = [{"question": str(i), "answer": ["a"], "n": i} for i in range(8)]


class Random:
    """One answer, rewarded by its first token; `group` of them in one dict."""

    def __init__(self, group=1, gconfig=GCONFIG):
        self.group = group
        self.gconfig = gconfig
        self.seen = []

    async def arun_episode(self, engine, data):
        self.seen.append(data["n"])
        responses = await asyncio.gather(
            *[engine.agenerate(ModelRequest(PROMPT, self.gconfig)) for _ in range(self.group)]
        )
        return concat_padded_tensors([single(r, r.output_tokens[0] % 5) for r in responses])


def step(actor, batch):
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    actor.step_lr_scheduler()
    actor.update_weights()
    return metrics


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


def test_a_batch_has_what_was_sampled_and_says_which_rollouts_are_compared(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(
        ROWS[:3], Random(gconfig=GCONFIG.new(temperature=0.7, top_k=9, top_p=0.8)), group_size=2
    )
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["rollout_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    calls = [trace.calls[0] for trace in batch.traces]
    for row, call in enumerate(calls):
        mask = batch["loss_mask"][row].bool()
        assert batch["input_ids"][row][mask].tolist() == list(call.completion_ids)
        assert batch["logprobs"][row][mask].tolist() == pytest.approx(list(call.logprobs))
        assert set(batch["versions"][row][~mask].tolist()) == {-1}
        assert set(batch["versions"][row][mask].tolist()) == {0}
    logp = actor.compute_logp(batch)
    torch.testing.assert_close(logp, batch["logprobs"], atol=1e-5, rtol=0)
    assert batch.account.sampled == int(batch["loss_mask"].sum())


def test_the_loop_makes_the_very_update_that_traces_make(make_loop, random_parts):
    """Several turns, masks, rewards of calls: one path of numbers from samples to weights."""

    class Mixed(TwoTurns):
        def __init__(self):
            super().__init__(self.spoil, gconfig=GCONFIG.new(temperature=0.8))
            self.count = 0

        def spoil(self, tensors, responses):
            self.count += 1
            mask = tensors["loss_mask"].clone()
            mask[0, 4 if self.count % 2 else 11] = 0
            return tensors | {"loss_mask": mask, "rewards": torch.tensor([float(self.count)])}

    actor, rollout = make_loop()
    before = {k: v.clone() for k, v in actor._run.stack.model.state_dict().items()}
    batch = rollout.rollout_batch(ROWS[:2], Mixed(), group_size=3)
    direct = build_batch(list(batch.traces))
    step(actor, batch)
    mine = {k: v.clone() for k, v in actor._run.stack.model.state_dict().items()}
    actor._run.stack.model.load_state_dict(before)
    trainer = PolicyTrainer(actor._run.stack.model, actor.trainer.settings)
    trainer.ppo_update(trainer.compute_advantages(direct))
    assert any(not torch.equal(mine[k], before[k]) for k in mine)
    for name, weights in trainer.model.state_dict().items():
        torch.testing.assert_close(weights, mine[name], atol=1e-6, rtol=0)


def test_metrics_of_an_update_say_where_every_sampled_token_went(make_loop):
    actor, rollout = make_loop()

    class SomeFail(Random):
        async def arun_episode(self, engine, data):
            number = len(self.seen) + 1
            tensors = await super().arun_episode(engine, data)
            match number:
                case 1:
                    raise ConnectionError("the search server is gone")
                case 2:
                    return None
            return tensors

    batch = rollout.rollout_batch(ROWS[:2], SomeFail(), group_size=4)
    batch["loss_mask"][0, 4] = 0
    metrics = step(actor, batch)
    assert batch.account.outcomes == {"completed": 6, "rejected": 1, "workflow_error": 1}
    assert "ConnectionError: the search server is gone" in batch.account.errors[0]
    dropped = {k: v for k, v in metrics.items() if k.startswith("tokens/dropped/")}
    assert dropped == {
        "tokens/dropped/masked": 1.0,
        "tokens/dropped/rejected": 5.0,
        "tokens/dropped/workflow_error": 5.0,
    }
    assert metrics["tokens/sampled"] == metrics["tokens/trained"] + sum(dropped.values()) == 40


def test_one_failing_rollout_does_not_take_its_group_along(make_loop):
    _, rollout = make_loop()

    class FirstFails(Random):
        async def arun_episode(self, engine, data):
            self.seen.append(1)
            if len(self.seen) == 1:
                raise ValueError("no")
            return single(await engine.agenerate(ModelRequest(PROMPT, GCONFIG)), 1)

    batch = rollout.rollout_batch(ROWS[:1], FirstFails(), group_size=3)
    assert batch["rewards"].tolist() == [1.0, 1.0]


def test_a_users_own_group_is_compared_as_one(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(group=3))
    assert batch["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["rollout_ids"].tolist() == list(range(6))
    actor.compute_advantages(batch)
    for rows in (slice(0, 3), slice(3, 6)):
        rewards, advantages = batch["rewards"][rows], batch["advantages"][rows][:, 3]
        wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(advantages, wanted, atol=1e-4, rtol=0)


def test_a_group_of_one_is_left_out_and_counted(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random())
    with pytest.raises(TrainingError, match=r"10 tokens were sampled and dropped .*group_of_one"):
        actor.compute_advantages(batch)


def test_trajectories_of_one_rollout_are_compared_by_their_own_rewards(make_loop):
    _actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:1], Random(group=2), group_size=2)
    assert batch["rollout_ids"].tolist() == [0, 0, 1, 1]
    batch["rewards"] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    found, _ = to_batch(batch, Selection(), SamplingParams(max_tokens=1))
    assert [row.reward for row in found.rows] == [0.0, 1.0, 2.0, 3.0]
    assert {row.peers for row in found.rows} == {0}
    batch["rewards"] = torch.tensor([1.0, 1.0, 3.0, 3.0])
    found, _ = to_batch(batch, Selection(scale=2.0, bias=-1.0), SamplingParams(max_tokens=1))
    assert [row.reward for row in found.rows] == [None] * 4
    assert found.rewards_R.tolist() == [0.0, 4.0]


def test_filters_leave_groups_out_and_count_them(make_loop):
    _, rollout = make_loop(success_rate_ub=0.9)

    class Easy(Random):
        async def arun_episode(self, engine, data):
            tensors = await super().arun_episode(engine, data)
            return tensors | {"rewards": torch.tensor([1.0 if data["n"] == 0 else 0.0])}

    batch = rollout.rollout_batch(ROWS[:3], Easy(), group_size=2)
    assert batch.account.outcomes == {"completed": 6, "success_rate_too_high": 2}
    assert batch.account.dropped == {"success_rate_too_high": 10}
    assert batch["group_ids"].tolist() == [1, 1, 2, 2]
    with pytest.raises(TrainingError, match="4 completed, 4 not_accepted"):
        rollout.rollout_batch(
            ROWS[1:3], Easy(), group_size=2, should_accept_fn=lambda t: bool(t["rewards"].sum() > 0)
        )


def test_workflow_functions_and_their_rewards_of_calls_become_trajectories(make_loop):
    actor, rollout = make_loop()

    async def chat(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages, max_tokens=4
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        if task["n"]:
            model.calls[0].reward = 0.25
        return WorkflowOutput(reward=1.0)

    batch = rollout.rollout_batch(ROWS[:2], chat, group_size=2)
    found = set(zip(batch["rollout_ids"].tolist(), batch["rewards"].tolist(), strict=True))
    assert found == {(0, 1.0), (1, 1.0), (2, 0.25), (2, 1.0), (3, 0.25), (3, 1.0)}
    assert int(batch["loss_mask"].sum()) == batch.account.sampled
    torch.testing.assert_close(actor.compute_logp(batch), batch["logprobs"], atol=1e-5, rtol=0)


def test_given_log_probs_are_the_policy_that_ratios_are_taken_to(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=3)
    actor.compute_advantages(batch)
    mask = batch["loss_mask"].bool()
    batch["prox_logp"] = actor.compute_logp(batch) - 0.5 * mask
    metrics = actor.ppo_update(batch)
    assert metrics["ratio_mean"] == pytest.approx(torch.e**0.5, rel=1e-4)


def test_advantages_may_be_the_users_own(make_loop):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    batch["advantages"] = torch.full(batch["input_ids"].shape, 2.0)
    assert actor.ppo_update(batch)["advantage_max"] == 2.0


def test_kl_is_taken_off_the_rewards_where_it_is_asked_for(make_loop):
    config_kl = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.1}}
    actor, rollout = make_loop(tuner={"algorithm": config_kl})
    for _ in range(2):  # the reference is the policy itself until the first update
        batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
        metrics = step(actor, batch)
    assert not torch.allclose(batch["ref_logp"], batch["logprobs"], atol=1e-3)
    assert metrics["tokens/trained"] == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("group_ids"), "has no group_ids; batches come from"),
        (lambda b: b.update(prox_logp=b["logprobs"][:, 1:]), "prox_logp has the shape"),
        (lambda b: b.update(loss_mask=torch.ones_like(b["loss_mask"])), "a token is trained once"),
        (lambda b: b.pop("advantages"), "call actor.compute_advantages"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(make_loop, change, message):
    actor, rollout = make_loop()
    batch = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    batch["advantages"] = torch.ones(batch["input_ids"].shape)
    change(batch)
    with pytest.raises(TrainingError, match=message):
        actor.ppo_update(batch)
    rollout.rollout_batch(ROWS[:1], Random(), group_size=2)  # nothing was held


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


@pytest.mark.parametrize(
    ("numbers", "allowed"),
    [
        ({}, 4),
        ({"running": 3}, 1),
        ({"accepted": 4}, 0),
        ({"accepted": 4, "version": 1}, 4),
        ({"staleness": 2}, 10),
        ({"staleness": 2, "running": 1, "accepted": 5}, 6),
        ({"staleness": 9, "max_running": 7, "running": 5}, 2),
        ({"accepted": 9}, 0),
    ],
)
def test_admission_is_bounded_by_staleness_and_room(numbers, allowed):
    given = {"max_running": 10, "running": 0, "accepted": 0, "batch": 4}
    assert admissible(**{**given, "version": 0, "staleness": 0, **numbers}) == allowed


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_sample_is_older_than_it_may_be_and_batches_are_begun_ahead(make_loop, staleness):
    actor, rollout = make_loop(staleness)
    workflow, loader = Random(), StatefulDataLoader(ROWS, 2, shuffle=True)
    oldest, begun = [], []
    for _ in range(4):
        batch = rollout.prepare_batch(loader, workflow, group_size=2)
        assert len(set(batch["group_ids"].tolist())) == 2
        begun.append(len(rollout._ahead))
        versions = batch["versions"][batch["loss_mask"].bool()]
        oldest.append(actor.get_version() - int(versions.min()))
        metrics = step(actor, batch)
        assert metrics["tokens/sampled"] == metrics["tokens/trained"]
    assert max(oldest) <= staleness
    assert begun == [2 * staleness] * 4
    rollout.destroy()


def test_a_batch_that_may_not_be_begun_says_why(make_loop):
    _, rollout = make_loop()
    loader = StatefulDataLoader(ROWS, 2)
    rollout.prepare_batch(loader, Random(), group_size=2)
    with pytest.raises(TrainingError, match=r"no group may be begun: .* max_head_offpolicyness"):
        rollout.prepare_batch(loader, Random(), group_size=2)


def test_groups_that_are_left_out_are_replaced_and_counted(make_loop):
    _, rollout = make_loop()
    loader = StatefulDataLoader(ROWS, 2)

    class Odd(Random):
        async def arun_episode(self, engine, data):
            tensors = await super().arun_episode(engine, data)
            return tensors if data["n"] % 2 else None

    batch = rollout.prepare_batch(loader, Odd(), group_size=2)
    assert len(set(batch["group_ids"].tolist())) == 2
    assert batch.account.outcomes["rejected"] >= 2
    dropped = batch.account.dropped["rejected"]
    assert batch.account.sampled == int(batch["loss_mask"].sum()) + dropped


def test_an_agent_that_always_fails_stops_the_loop_with_its_error(make_loop):
    _, rollout = make_loop()

    class Broken:
        async def arun_episode(self, engine, data):
            raise KeyError("answer")

    with pytest.raises(TrainingError, match=r"12 workflow_error; the last error: .*KeyError"):
        rollout.prepare_batch(StatefulDataLoader(ROWS, 2), Broken(), group_size=2)
    with pytest.raises(TrainingError, match="no trajectory is left to train"):
        rollout.rollout_batch(ROWS[:2], Broken(), group_size=2)


def test_a_programs_mistake_comes_out_of_the_verb(make_loop):
    _, rollout = make_loop()
    with pytest.raises(FunctionError, match="train the same call"):
        rollout.rollout_batch(ROWS[:2], Twice(0, 1), group_size=2)
    with pytest.raises(FunctionError, match="is no workflow"):
        rollout.rollout_batch(ROWS[:2], object())


def test_a_workflow_may_not_wait_for_workflows(make_loop):
    _actor, rollout = make_loop()

    class Nested(Random):
        async def arun_episode(self, engine, data):
            rollout.rollout_batch(ROWS[:1], Random(), group_size=2)

    with pytest.raises(TrainingError, match="a workflow called a verb of the training loop"):
        rollout.rollout_batch(ROWS[:1], Nested(), group_size=2)


def test_a_killed_loop_goes_on_with_the_same_rows_and_weights(make_loop, tmp_path):
    def states(rollout, loader):
        return json.dumps({"rollout": rollout.state_dict(), "loader": loader.state_dict()})

    def rows(batch):
        return [trace.task["n"] for trace in batch.traces if trace.id.rollout == 0]

    actor, rollout = make_loop(staleness=1)
    loader = StatefulDataLoader(ROWS, 2, shuffle=True)
    step(actor, rollout.prepare_batch(loader, Random(), group_size=2))
    actor.save(tmp_path / "checkpoint")
    saved = states(rollout, loader)
    wanted = sorted(n for _ in range(2) for n in rows(_stepped(actor, rollout, loader)))
    rollout.destroy()

    actor, rollout = make_loop(staleness=1)
    actor.load(tmp_path / "checkpoint")
    loader = StatefulDataLoader(ROWS, 2, shuffle=True)
    state = json.loads(saved)
    rollout.load_state_dict(state["rollout"])
    loader.load_state_dict(state["loader"])
    assert actor.get_version() == rollout.get_version() == 1
    found = sorted(n for _ in range(2) for n in rows(_stepped(actor, rollout, loader)))
    assert found == wanted
    rollout.destroy()


def _stepped(actor, rollout, loader):
    batch = rollout.prepare_batch(loader, Random(), group_size=2)
    assert len(rollout._ahead) == 2  # one batch ahead, also after going on
    step(actor, batch)
    return batch


def test_the_data_loader_goes_on_where_it_was():
    loader = StatefulDataLoader(range(7), 2, shuffle=True)
    first = [*loader, *loader]
    assert [len(batch) for batch in first] == [2] * 6
    assert first[:3] != first[3:]
    other = StatefulDataLoader(range(7), 2, shuffle=True)
    iterator = iter(other)
    assert [next(iterator), next(iterator)] == first[:2]
    resumed = StatefulDataLoader(range(7), 2, shuffle=True)
    resumed.load_state_dict(other.state_dict())
    assert [*resumed, *resumed] == first[2:]
    assert [len(batch) for batch in StatefulDataLoader(range(7), 2, drop_last=False)] == [
        2,
        2,
        2,
        1,
    ]
    with pytest.raises(DatasetError, match="has 1 rows and batch_size is 2"):
        StatefulDataLoader([1], 2)


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
        {"on_failure": "abort"},
        {"on_failure": {"penalize": -1.0}},
        {"algorithm": {"overlong_buffer": 3}},
    ],
)
def test_settings_without_effect_here_are_refused(setting):
    config = GRPOConfig(gconfig=GCONFIG, tuner={"tuner": setting})
    with pytest.raises(ConfigError, match=r"the loop in the open"):
        RolloutEngine(config.rollout).initialize()


def test_attempts_that_were_tried_again_are_counted(make_loop):
    _, rollout = make_loop(tuner={"explorer": {"max_retry_times": 1}})

    class Flaky(Random):
        async def arun_episode(self, engine, data):
            number = len(self.seen) + 1
            tensors = await super().arun_episode(engine, data)
            if number == 1:
                raise ConnectionError("once")
            return tensors

    batch = rollout.rollout_batch(ROWS[:1], Flaky(), group_size=2)
    assert batch.account.dropped == {"retried_attempt": 5}
    assert batch.account.sampled == 15


@pytest.mark.parametrize(
    ("tuner", "named"),
    [
        ({"algorithm": {"algorithm_type": "ppo"}}, "whose critic the loop in the open does not"),
        ({"model": {"lora_configs": [{"lora_rank": 2}]}}, "model.lora_configs is set"),
    ],
)
def test_what_only_tune_trains_is_refused(make_loop, tuner, named):
    with pytest.raises(ConfigError, match=named):
        make_loop(tuner=tuner)


def test_what_runs_ahead_goes_on_while_an_update_is_made(make_loop):
    actor, rollout = make_loop(staleness=1)
    loader = StatefulDataLoader(ROWS, 2)
    batch = rollout.prepare_batch(loader, Random(), group_size=2)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    # Nobody was told of the new weights yet: the engine goes on with those that it has.
    between = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    assert {v for t in between.traces for c in t.calls for v in c.versions} == {0}
    actor.update_weights()
    after = rollout.rollout_batch(ROWS[:2], Random(), group_size=2)
    assert {v for t in after.traces for c in t.calls for v in c.versions} == {1}
    after.pop("prox_logp", None)
    logp = actor.compute_logp(after)
    mask = after["loss_mask"].bool()
    assert torch.allclose(logp[mask], after["logprobs"][mask].to(logp), atol=1e-4)

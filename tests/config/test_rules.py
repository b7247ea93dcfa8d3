"""Each rule of the table of contradictions, by settings that it refuses."""

# ruff: noqa: E501  # a table
from __future__ import annotations

import pytest

from tuner.config import RunConfig, load_config
from tuner.config.rules import Rule, rules
from tuner.config.schema import section_of
from tuner.errors import ConfigError

DATA = "buffer.trainer_input.experience_buffer"
TASKS = "buffer.explorer_input"
MODEL = "explorer.rollout_model"
FIXED = f"{MODEL}.engine_type=vllm"
SGLANG = f"{MODEL}.engine_type=sglang"

# The key that is refused, and the overrides.
CASES = [
    line.split(" <- ")
    for line in f"""
algorithm.optimizer.lr_warmup_steps <- algorithm.optimizer.lr_warmup_steps=0 | algorithm.optimizer.lr_warmup_steps_ratio=0.1
model.max_response_tokens <- model.max_response_tokens=64 | model.max_model_len=64
model.chat_template_path <- model.chat_template_path=y | model.custom_chat_template=x
tuner.reasoning <- tuner.reasoning=keep | {MODEL}.reasoning_parser=null
model.lora_configs.0.exclude_modules <- model.lora_configs=[{{path: /x, exclude_modules: [a]}}]
model.adapters.w.target_modules <- model.adapters={{w: {{path: /x, target_modules: [a]}}, c: frozen}}
model.lora_configs <- model.adapters={{w: {{}}}} | model.lora_configs=[{{}}]
mode <- model.adapters={{w: {{}}}} | mode=train | tuner.history={{}}
algorithm.advantage_fn <- model.adapters={{w: {{}}}} | algorithm.algorithm_type=ppo
algorithm.advantage_fn <- model.adapters={{w: {{}}}} | algorithm.algorithm_type=tree
{TASKS}.taskset.rollout_args.temperature <- {TASKS}.taskset.rollout_args.temperature=0
{TASKS}.eval_tasksets.0.repeat_times <- {TASKS}.eval_tasksets=[{{repeat_times: 2}}]
tuner.agent <- tuner.agent={{type: A}} | tuner.environment={{type: E}} | tuner.workflow=a:b
tuner.agent <- tuner.agent={{type: A}}
tuner.environment <- tuner.environment={{type: E}}
tuner.agent <- tuner.agent={{type: A}} | tuner.environment=a:b
tuner.judge <- tuner.environment={{kind: trl}} | tuner.judge=a:c
tuner.workers <- tuner.workers=ray | tuner.ray.gateway=10.0.0.1 | cluster.ray_address=auto
tuner.workers <- tuner.workers=ray | cluster.ray_address=h:1
tuner.ray.gateway <- tuner.workers=ray | tuner.ray.gateway=0.0.0.0:80 | cluster.ray_address=h:1
tuner.ray.base_url <- tuner.workers=ray | tuner.ray.gateway=10.0.0.1 | cluster.ray_address=h:1 | tuner.ray.base_url=https://t/v1 | explorer.auxiliary_models=[{{name: t, model_path: a}}]
tuner.tasks.selector <- tuner.tasks.selector={{}} | mode=train | tuner.history={{}}
{TASKS}.taskset.data_selector.selector_type <- tuner.tasks.selector={{}} | {TASKS}.taskset.data_selector.selector_type=shuffle
tuner.tasks.selector.field <- tuner.tasks.selector={{kind: stratified}}
tuner.tasks.selector.weights <- tuner.tasks.selector={{weights: {{a: 1}}}}
tuner.tasks.selector.floor <- tuner.tasks.selector={{kind: stratified, field: f, floor: 0.2}}
explorer.over_rollout.ratio <- explorer.over_rollout.ratio=0.1 | algorithm.algorithm_type=sft
synchronizer.sync_offset <- synchronizer.sync_offset=2 | tuner.history={{}}
synchronizer.sync_offset <- synchronizer.sync_offset=2 | tuner.deterministic=true
algorithm.sample_strategy <- algorithm.sample_strategy=staleness_control | algorithm.sample_strategy_args.max_staleness=2
algorithm.sample_strategy_args.max_staleness <- algorithm.sample_strategy=staleness_control | synchronizer.sync_offset=2
algorithm.sample_strategy_args.max_staleness <- algorithm.sample_strategy_args.max_staleness=2
explorer.over_rollout.wait_after_min <- explorer.over_rollout.wait_after_min=3
{MODEL}.engine_num <- {MODEL}.engine_num=2
tuner.engine.sleep <- tuner.engine.sleep=false
tuner.placement <- tuner.placement=separate
tuner.deterministic <- {SGLANG} | tuner.deterministic=true | tuner.engine.urls=[http://a]
tuner.placement <- {FIXED} | tuner.placement=colocate | tuner.engine.urls=[http://a]
{MODEL}.engine_num <- {FIXED} | tuner.engine.urls=[http://a] | {MODEL}.engine_num=2
{MODEL}.engine_num <- {FIXED} | {MODEL}.engine_num=2 | tuner.placement=colocate
tuner.engine.sleep <- {FIXED} | tuner.engine.sleep=true | synchronizer.sync_offset=1
model.lora_configs.0.lora_rank <- {FIXED} | model.lora_configs=[{{lora_rank: 513}}]
model.adapters.w.lora_rank <- {FIXED} | model.adapters={{w: {{lora_rank: 513}}, c: frozen}}
tuner.engine.urls <- {SGLANG}
tuner.placement <- {SGLANG} | tuner.engine.urls=[http://a] | tuner.placement=colocate
{MODEL}.tensor_parallel_size <- {SGLANG} | tuner.engine.urls=[http://a] | {MODEL}.tensor_parallel_size=2
model.lora_configs <- {SGLANG} | tuner.engine.urls=[http://a] | model.lora_configs=[{{}}]
model.adapters <- {SGLANG} | tuner.engine.urls=[http://a] | model.adapters={{w: {{}}}}
model.top_k <- {SGLANG} | tuner.engine.urls=[http://a] | model.top_k=3 | model.top_p=0.9
algorithm.advantage_fn <- algorithm.advantage_fn=none
algorithm.policy_loss_fn <- algorithm.policy_loss_fn=dpo
algorithm.policy_loss_fn <- algorithm.policy_loss_fn=sft
algorithm.policy_loss_fn <- algorithm.advantage_fn=best_of_group
algorithm.kl_penalty_fn <- algorithm.algorithm_type=raft | algorithm.kl_penalty_fn=k1
algorithm.kl_penalty_fn <- algorithm.algorithm_type=tree | algorithm.kl_penalty_fn=k1
algorithm.policy_loss_fn_args.tau_neg <- algorithm.algorithm_type=sapo | algorithm.policy_loss_fn_args.tau_neg=0.5
algorithm.policy_loss_fn_args.clip_range_low <- algorithm.policy_loss_fn_args.clip_range_low=1
tuner.algorithm.success_rate_lb <- tuner.algorithm.success_rate_lb=0.9 | tuner.algorithm.success_rate_ub=0.5
tuner.algorithm.rejection_low <- tuner.algorithm.rejection_low=0.1
tuner.algorithm.rejection_high <- tuner.algorithm.rejection_high=3
tuner.algorithm.overlong_penalty <- tuner.algorithm.overlong_penalty=2
tuner.algorithm.overlong_buffer <- tuner.algorithm.overlong_buffer=80 | model.max_response_tokens=64
tuner.algorithm.overlong_buffer <- tuner.algorithm.overlong_buffer=80
tuner.algorithm.importance_cap <- tuner.algorithm.importance_sampling=none | tuner.algorithm.importance_cap=3
algorithm.repeat_times <- algorithm.repeat_times=1
tuner.algorithm.dynamic_sampling <- algorithm.algorithm_type=reinforceplusplus | algorithm.repeat_times=1 | tuner.algorithm.dynamic_sampling=true
tuner.algorithm.turn_discount <- algorithm.algorithm_type=ppo | tuner.algorithm.turn_discount=0.5
tuner.algorithm.turn_discount <- algorithm.algorithm_type=tree | tuner.algorithm.turn_discount=0.5
tuner.algorithm.turn_discount <- algorithm.algorithm_type=gigpo | tuner.algorithm.turn_discount=0.5
tuner.critic.lr <- tuner.critic.lr=0.1
trainer.critic_warmup <- trainer.critic_warmup=2
tuner.algorithm.proximal <- algorithm.algorithm_type=topr | tuner.algorithm.proximal=recompute
tuner.branching <- tuner.branching={{}}
tuner.branching.trunks <- algorithm.algorithm_type=tree | tuner.branching={{}} | algorithm.repeat_times=2
tuner.branching.ends <- algorithm.algorithm_type=tree | tuner.branching={{where: best, ends: 3}}
tuner.branching.seed_functions <- algorithm.algorithm_type=tree | tuner.branching={{seed_functions: true}}
explorer.over_rollout.ratio <- algorithm.algorithm_type=tree | tuner.branching={{}} | explorer.over_rollout.ratio=0.1
mode <- mode=train
tuner.algorithm.teacher <- tuner.algorithm.teacher=t
explorer.auxiliary_models <- algorithm.algorithm_type=on_policy_distill
tuner.algorithm.prompt <- algorithm.algorithm_type=prompt_distill
tuner.algorithm.prompt_teacher <- tuner.algorithm.prompt_teacher=policy
tuner.algorithm.reward_bias <- algorithm.algorithm_type=prompt_distill | tuner.algorithm.prompt=p | tuner.algorithm.reward_bias=1
algorithm.kl_penalty_fn <- algorithm.algorithm_type=prompt_distill | tuner.algorithm.prompt=p | algorithm.kl_penalty_fn=k1
tuner.on_failure <- algorithm.algorithm_type=prompt_distill | tuner.algorithm.prompt=p | tuner.on_failure={{penalize: 0}}
mode <- algorithm.algorithm_type=dpo | mode=explore
tuner.algorithm.updates <- algorithm.algorithm_type=sft | tuner.algorithm.updates=2
tuner.on_failure <- algorithm.algorithm_type=sft | tuner.on_failure=abort
{DATA}.format.chosen_key <- algorithm.algorithm_type=sft | {DATA}.format.chosen_key=c
{DATA}.format.response_key <- algorithm.algorithm_type=dpo | {DATA}.format.response_key=c
{TASKS}.taskset.path <- algorithm.algorithm_type=sft | {TASKS}.taskset.path=/d
mode <- tuner.history={{}} | mode=both
{DATA}.path <- tuner.history={{}} | {DATA}.path=/d
tuner.branching <- tuner.history={{}} | algorithm.algorithm_type=sft | tuner.branching={{}}
tuner.history.best <- tuner.history={{best: 2}}
tuner.history.min_gap <- tuner.history={{min_gap: 0.1}}
tuner.history.min_effective_samples <- algorithm.algorithm_type=dpo | tuner.history={{min_effective_samples: 0.1}}
tuner.history.min_reward <- tuner.history={{min_reward: 1, max_reward: 0}}
tuner.history.min_version <- tuner.history={{min_version: 1, max_version: 0}}
tuner.history.min_step <- tuner.history={{min_step: 1, max_step: 0}}
""".strip().splitlines()
]


@pytest.fixture
def triggered(monkeypatch):
    """The sentences of the rules that configurations were refused by."""
    found: set[str] = set()
    problems_of = Rule.problems

    def watched(rule, config):
        for problem in problems_of(rule, config):
            found.add(rule.says)
            yield problem

    monkeypatch.setattr(Rule, "problems", watched)
    return found


@pytest.mark.parametrize(("key", "given"), CASES)
def test_a_contradiction_names_the_key_and_what_to_do(key, given):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=given.split(" | "))
    assert f"{key} " in str(error.value)


def test_every_rule_has_a_case(triggered):
    for _, given in CASES:
        with pytest.raises(ConfigError):
            load_config(overrides=given.split(" | "))
    assert {rule.says for group in rules() for rule in group.rules} == triggered


def test_defaults_contradict_nothing(triggered):
    load_config()
    assert triggered == set()


def is_there(path):
    """Whether a path leads to a setting, or to a property of a section."""
    section = RunConfig
    for name in path.split("."):
        info = section.model_fields.get(name)
        if info is None:
            return hasattr(section, name)
        section = section_of(info.annotation)
    return True


def test_conditions_are_about_settings_that_there_are():
    groups = rules()
    conditions = [group.where for group in groups]
    conditions += [rule.when for group in groups for rule in group.rules]
    paths = {path for each in conditions for path in each}
    for each in conditions:
        paths |= {
            path
            for wanted in each.values()
            if isinstance(wanted, dict)
            for path in wanted.values()
            if isinstance(path, str) and "." in path
        }
    about = {path for path in paths if path.partition(".")[0] not in ("value", "item")}
    assert [path for path in sorted(about) if not is_there(path)] == []

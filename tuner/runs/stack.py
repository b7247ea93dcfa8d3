"""Builds the parts of a run from its configuration: model, engine, gateway, trainer, runner."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tuner.config import RunConfig
from tuner.config.schema import FROZEN, AlgorithmSection
from tuner.encoding import NotText, read_text_file
from tuner.engines import TrainingEngine
from tuner.engines.images import ImageLimits
from tuner.engines.remote import ServedEngine
from tuner.engines.request import end_ids_of
from tuner.engines.transformers.engine import TransformersEngine
from tuner.engines.transformers.model_shape import length_limit
from tuner.engines.transformers.vision import Vision, train_vision, vision_of
from tuner.errors import ConfigError
from tuner.gateway import ChatRenderer, Gateway, Roles, SamplingDefaults, SessionLimits
from tuner.gateway.families.renderer import SystemPrompt
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.chat_models import chat_model, default_kind
from tuner.rollouts.worker_pool import Pool, opening_of, pool_of
from tuner.runs.auxiliary import AuxiliaryModels
from tuner.runs.models import (
    Adapter,
    RoleAdapters,
    ServedCopy,
    add_adapter,
    add_adapters,
    check_same_vocabulary,
    choose_device,
    choose_dtype,
    load_model,
    load_tokenizer,
    peft_name,
    require_peft,
    save_policy,
    stop_at_turns,
)
from tuner.runs.placement import (
    Arrangement,
    EngineChoice,
    Machine,
    Needs,
    build_engine,
    cache_memory,
    choose_engine,
    micro_batch_tokens,
    needs_of,
)
from tuner.tasks.functions import end_run
from tuner.tasks.loading import without_collection
from tuner.training.batch import Overlong, Selection, TeacherPrompt, own_prompt
from tuner.training.references import Reference
from tuner.training.trainer import PolicyTrainer, RoleTrainers

# Settings of rollouts and of the trainer, from the configuration.


def rollout_settings(config: RunConfig) -> RolloutSettings:
    """Limits of a rollout, and whether it must have a reward."""
    row = config.algorithm.row
    return RolloutSettings(
        timeout=config.explorer.max_timeout,
        max_retries=config.explorer.max_retry_times,
        seed=config.tuner.seed,
        limits=SessionLimits(config.tuner.max_calls, config.tuner.max_tokens),
        tool_seconds=config.tuner.max_tool_seconds,
        seeds_functions=config.tuner.deterministic
        or (config.tuner.branching is not None and config.tuner.branching.seed_functions),
        feedback_attempts=config.tuner.feedback_attempts,
        pass_reward=config.tuner.pass_reward,
        # Without training rollouts, those of an evaluation need rewards.
        needs_reward=row.recorded is not None or config.algorithm.advantage.needs_reward,
    )


def for_trainer(config: RunConfig, total_steps: int, micro_batch_tokens: int) -> RunConfig:
    """The configuration completed with values determined by the run; without a reference and a
    critic if nothing is trained."""
    algorithm = config.algorithm
    if config.mode == "explore":
        parts = {"advantage_fn": "reinforce", "policy_loss_fn": "importance_sampling"}
        algorithm = AlgorithmSection.model_validate(
            {**parts, "kl_loss_fn": "none", "optimizer": algorithm.optimizer}
        )
    buffer = config.buffer.model_copy(update={"total_steps": total_steps})
    trainer = config.trainer.model_copy(update={"max_token_len_per_gpu": micro_batch_tokens})
    return config.model_copy(update={"algorithm": algorithm, "buffer": buffer, "trainer": trainer})


def selection(config: RunConfig) -> Selection:
    """Which groups are trained, and how their rewards are changed."""
    algorithm, extras = config.algorithm, config.tuner.algorithm
    varied = algorithm.row.dynamic_sampling
    advantage = algorithm.advantage
    longest = config.longest_answer
    overlong = None
    if extras.overlong_buffer is not None and longest is not None:
        overlong = Overlong(longest, extras.overlong_buffer, extras.overlong_penalty)
    return Selection(
        success_rate=(extras.success_rate_lb, extras.success_rate_ub),
        varied_only=varied if extras.dynamic_sampling is None else extras.dynamic_sampling,
        best_only=algorithm.advantage_fn == "best_of_group",
        lone_rewards=not advantage.needs_group or config.call_discount is not None,
        scale=extras.reward_scale,
        bias=extras.reward_bias,
        overlong=overlong,
        needs_group=advantage.needs_group,
        needs_reward=advantage.needs_reward,
    )


def adds_up(config: RunConfig) -> bool:
    """Whether calls are credited with later rewards, so rewards count where they occur."""
    return config.call_discount is not None or config.algorithm.advantage_fn == "ppo"


_log = logging.getLogger(__name__)


@dataclass
class Stack:
    """The parts of a run on one machine. The trainer owns `model`, including its adapters if
    there are some. The engine over transformers generates with the same model, unless
    generation continues during training; every other engine uses a copy.

    Attributes:
        choice: The engine, and the reason if it was chosen automatically.
        needs: Expected requirements of the run.
        served: The copy of `model` that the engine over transformers then uses, otherwise None.
        arrangement: Placement of an engine with a copy; None for the one over transformers.
        runner: None if there is no workflow, so there are no rollouts.
        workers: Processes that run the workflow and the judge, if any.
        turn_ends: A sentence about ends of turns that the model's settings do not name, if any.
        teacher: The auxiliary model that `on_policy_distill` learns from.
        teacher_prompt: Prompt that a teacher reads before a call.
    """

    model: PreTrainedModel
    adapter: Adapter | RoleAdapters | None
    tokenizer: Any
    engine: TrainingEngine
    gateway: Gateway
    auxiliary: AuxiliaryModels
    runner: RolloutRunner | None
    choice: EngineChoice
    needs: Callable[[], Needs]
    teacher: PreTrainedModel | None = None
    teacher_prompt: TeacherPrompt = own_prompt
    served: ServedCopy | None = None
    arrangement: Arrangement | None = None
    workers: Pool | None = None
    turn_ends: str | None = None

    @property
    def shares_weights(self) -> bool:
        """Whether the engine generates with the trained weights themselves."""
        return self.served is None and self.engine.capabilities.shares_weights

    @property
    def takes_turns(self) -> bool:
        """Whether generation stops while the weights are trained."""
        sleeps = self.arrangement is not None and self.arrangement.placement.sleeps
        return self.shares_weights or sleeps

    @property
    def decisions(self) -> list[str]:
        """Decisions about the parts, one sentence each."""
        parts: list[Any] = [] if self.adapter is None else [self.adapter]
        if self.turn_ends is not None:
            parts.append(self.turn_ends)
        if self.choice.why:
            parts.append(self.choice)
        if self.arrangement is not None:
            parts += [self.arrangement.placement, self.arrangement.weights]
        if self.workers is not None:
            parts.append(self.workers)
        return [str(part) for part in parts]

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Allow weight changes inside the block; see `TrainingEngine.training`."""
        if self.served is not None:  # which changes only in `publish`
            yield
            return
        async with self.engine.training():  # the reference may be the model without its adapter
            yield

    async def reach_servers(self) -> None:
        """Send the weights to remote servers early, so that problems appear before the first
        rollout.

        Raises:
            EngineError: A server cannot be reached or cannot load them; names the setting
                or the cause.
        """
        if isinstance(self.engine, ServedEngine):
            await self.engine.start()

    async def publish(self, trainer: PolicyTrainer | RoleTrainers) -> None:
        """Update the engine to the trainer's weights, between two tokens of running requests."""
        async with self.engine.pause():
            if self.served is not None:
                self.served.update()
            await trainer.update_weights(self.engine)

    def save_weights(self, folder: Path) -> None:
        """Save the trained model or adapter in Hugging Face's format, and the tokenizer."""
        save_policy(self.model, self.adapter, self.tokenizer, folder)

    async def aclose(self) -> None:
        if self.runner is not None:
            await end_run(self.runner.workflow)
        if self.workers is not None:
            await self.workers.aclose()
        await self.auxiliary.aclose()
        await self.gateway.aclose()
        await self.gateway.engine.close()


@without_collection()
def build_stack(
    config: RunConfig,
    *,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    weights: Path | None = None,
    version: int = 0,
    apart: bool = False,
) -> Stack:
    """Load the models and build the parts.

    Args:
        config: The effective configuration.
        workflow, judge: The user's functions; no workflow if there are no rollouts.
        weights: Checkpoint of the model or adapter to resume from.
        version: Number of updates of those weights.
        apart: Whether the functions may run in other processes (`tuner.workers`).

    Raises:
        FunctionError: A function cannot be sent to another process.
        ModelLoadError: A model or adapter cannot be loaded.
        ConfigError: `max_model_len` exceeds the model's positions, the teacher has another
            vocabulary, the chat template has no place for a teacher's prompt, `lora_configs` names
            layers that the model does not have, or vLLM does not fit next to the trainer.
        MissingDependencyError: peft (for `lora_configs`) or vLLM is not installed.
    """
    kind = default_kind()
    workers = pool_of(config, workflow, judge, kind) if apart else None
    device = choose_device(config.tuner.device)
    path, adapter = config.model.model_path, None
    dtype = choose_dtype(config.tuner.dtype, device)
    load_vision = config.tuner.images.load_vision
    if not config.model.loras:
        setting = "model.model_path" if weights is None else "the checkpoint to resume from"
        model = load_model(
            str(weights or path),
            device=device,
            dtype=dtype,
            setting=setting,
            load_vision=load_vision,
        )
        check_vision(config, model)
    else:
        require_peft()
        model = load_model(path, device=device, dtype=dtype, load_vision=load_vision)
        check_vision(config, model)
        adapter = _adapter(model, config, weights)
    tokenizer = load_tokenizer(path)
    renderer = chat_renderer(
        config, tokenizer, end_ids_of(model.generation_config, tokenizer), vision_of(model)
    )
    turn_ends = stop_at_turns(model, tokenizer, renderer.end_ids)
    trained = for_trainer(config, 1, 1)
    auxiliary = AuxiliaryModels(kind)
    loaded = add_auxiliary_models(auxiliary, config, model.device, model.dtype, workers)
    context = context_length(config.model.max_model_len, model.config, "model.max_model_len")
    longest = config.model.max_response_tokens
    if longest is not None and longest >= context:
        raise ConfigError(
            f"model.max_response_tokens = {longest}, which leaves no room for a prompt in the "
            f"{context} tokens of the model's context; lower it"
        )
    needs = partial(
        needs_of,
        config,
        model,
        context,
        references=int(trained.uses_reference and adapter is None),
        critics=int(trained.algorithm.uses_critic),
        auxiliary=sum(
            p.numel() * p.element_size() for other, _ in loaded.values() for p in other.parameters()
        ),
    )
    peft = None if adapter is None else adapter.model
    machine = Machine.here(model.device)
    if vision_of(model) is None:
        choice = choose_engine(config, machine, needs, adapter=peft)
    else:
        choice = EngineChoice("transformers", "because no other engine gets images here")
    served = None
    if config.synchronizer.sync_offset and choice.engine_type == "transformers":
        served = ServedCopy(model)
    engine, arrangement = build_engine(
        choice.applied(config),
        model if served is None else served.model,
        tokenizer,
        max_model_len=context,
        version=version,
        save=partial(save_policy, model, adapter, tokenizer),
        needs=needs,
        adapter=peft,
    )
    for served_model in auxiliary.gateways:
        if isinstance(served_model.engine, TransformersEngine):
            served_model.engine.limit_cache(cache_memory(config, needs(), model.device))
    gateway = Gateway(
        engine,
        renderer,
        model_name=path,
        reasoning=config.tuner.reasoning,
        opening=opening_of(workers),
        roles=roles_of(config),
    )
    teacher = None
    if config.algorithm.advantage_fn == "on_policy_distill":
        name = config.tuner.algorithm.teacher or config.explorer.auxiliary_models[0].name
        teacher, spoken = loaded[name]
        check_same_vocabulary(tokenizer, spoken, what=f"the teacher {name!r}")
    told: TeacherPrompt = own_prompt
    if config.tuner.algorithm.prompt is not None:
        told = SystemPrompt(renderer, config.tuner.algorithm.prompt, limit=context)
    runner = None
    if workflow is not None:
        import_module("tuner.gateway.clients")  # or the first rollout would, within its time limit
        runner = RolloutRunner(
            gateway,
            workflow,
            judge,
            make_model=partial(chat_model, kind=kind),
            auxiliary_models=auxiliary.opened,
            settings=rollout_settings(config),
            workers=workers,
        )
    if workers is not None:
        workers.start([gateway, *auxiliary.gateways])
    return Stack(
        model,
        adapter,
        tokenizer,
        engine,
        gateway,
        auxiliary,
        runner,
        choice,
        needs,
        teacher=teacher,
        teacher_prompt=told,
        served=served,
        arrangement=arrangement,
        workers=workers,
        turn_ends=turn_ends,
    )


def roles_of(config: RunConfig) -> Roles:
    """The adapters that the calls of roles are sampled with."""
    adapters = config.model.adapters.items()
    return Roles({role: None if one == FROZEN else peft_name(role) for role, one in adapters})


def _adapter(model: PreTrainedModel, config: RunConfig, checkpoint: Path | None) -> Any:
    """Add the adapter to a model, or those of all roles."""
    given: Any = {"model_path": config.model.model_path, "seed": config.tuner.seed}
    given["checkpoint"] = checkpoint
    if config.model.lora is not None:
        return add_adapter(model, config.model.lora, **given)
    settings = {key.rpartition(".")[2]: one for key, one in config.model.loras.items()}
    return add_adapters(model, settings, **given)


def build_trainers(
    config: RunConfig, stack: Stack, *, total_steps: int
) -> PolicyTrainer | RoleTrainers:
    """Create the trainer for the stack's model, or those of the roles with adapters."""
    if not isinstance(stack.adapter, RoleAdapters):
        return build_trainer(config, stack, total_steps=total_steps)
    make = partial(_trainer, config, stack, total_steps=total_steps)
    each = {role: partial(make, adapter) for role, adapter in stack.adapter.items()}
    return RoleTrainers(each, stack.adapter.alone)


def build_trainer(config: RunConfig, stack: Stack, *, total_steps: int) -> PolicyTrainer:
    """Create the trainer for the stack's model; its reference is always the initial model of
    the run.

    Raises:
        ConfigError: Roles have their own adapters, each of which needs a trainer.
    """
    if isinstance(stack.adapter, RoleAdapters):
        raise ConfigError(
            "model.adapters is set, but only tune() and `tuner run` train roles with their own "
            "adapters: set model.lora_configs instead"
        )
    return _trainer(config, stack, stack.adapter, total_steps=total_steps)


def _trainer(
    config: RunConfig, stack: Stack, adapter: Adapter | None, *, total_steps: int
) -> PolicyTrainer:
    budget = micro_batch_tokens(config, stack.engine.capabilities.max_model_len)
    config = for_trainer(config, total_steps, budget)
    reference: Reference | None = None
    if config.uses_reference and adapter is not None:
        reference = adapter.reference()
    elif config.uses_reference and stack.engine.version > 0:
        reference = load_model(
            config.model.model_path,
            device=stack.model.device,
            dtype=stack.model.dtype,
            load_vision=config.tuner.images.load_vision,
        )
    policy = stack.model if adapter is None else adapter.model
    return PolicyTrainer(
        policy,
        config,
        reference=reference,
        grammars=stack.engine.grammars,
        critic=_critic(config, stack) if config.algorithm.uses_critic else None,
        teacher=stack.teacher,
    )


def _critic(config: RunConfig, stack: Stack) -> PreTrainedModel:
    """The initial model of the critic; it must read the policy's token ids."""
    device, dtype = stack.model.device, stack.model.dtype
    path, setting = config.model.critic_model_path, "model.critic_model_path"
    if not path:
        return load_model(config.model.model_path, device=device, dtype=dtype)
    tokenizer = load_tokenizer(path, setting=setting)
    check_same_vocabulary(stack.tokenizer, tokenizer, what=f"{setting} = {path!r}")
    return load_model(path, device=device, dtype=dtype, setting=setting)


def check_vision(config: RunConfig, model: PreTrainedModel) -> None:
    """Train the vision tower of a vision model if that is asked for.

    Raises:
        ConfigError: The model reads images, and a setting does not support that; or it does not,
            and the vision tower is to be trained.
    """
    train = config.tuner.images.train_vision
    if vision_of(model) is None:
        if train:
            raise ConfigError(
                "tuner.images.train_vision is true, but the model reads text only: set it to false"
            )
        return
    engine = config.explorer.rollout_model.engine_type
    algorithm = config.algorithm
    for setting, value, refused in (
        ("explorer.rollout_model.engine_type", engine, engine not in ("auto", "transformers")),
        ("algorithm.advantage_fn", algorithm.advantage_fn, algorithm.uses_critic),
        (
            "algorithm.advantage_fn",
            algorithm.advantage_fn,
            algorithm.advantage_fn == "on_policy_distill",
        ),
        ("algorithm.algorithm_type", algorithm.algorithm_type, algorithm.row.recorded is not None),
    ):
        if refused:
            raise ConfigError(
                f"{setting} is {value}, which does not support vision models: choose another, "
                "or a model that reads text only"
            )
    if train:
        train_vision(model)


def chat_renderer(
    config: RunConfig,
    tokenizer: Any,
    end_ids: Collection[int] = (),
    vision: Vision | None = None,
) -> ChatRenderer:
    """The chat renderer of the trained model.

    Args:
        end_ids: Tokens that end a completion by the model's configuration.
        vision: How the model reads images, if it does.
    """
    images = config.tuner.images
    rollout_model = config.explorer.rollout_model
    template = config.model.custom_chat_template
    if config.model.chat_template_path is not None:
        try:
            template = read_text_file(config.model.chat_template_path)
        except (OSError, NotText) as error:
            raise ConfigError(
                f"model.chat_template_path: {config.model.chat_template_path} cannot be read: "
                f"{getattr(error, 'strerror', error)}"
            ) from error
    return ChatRenderer(
        tokenizer,
        chat_template=template,
        enable_thinking=config.model.enable_thinking,
        tool_call_parser=rollout_model.tool_call_parser,
        reasoning_parser=rollout_model.reasoning_parser,
        end_ids=end_ids,
        vision=vision,
        image_limits=ImageLimits(
            count=images.max_count,
            content=images.max_bytes,
            pixels=images.max_pixels,
            folder=None if images.folder is None else Path(images.folder),
            hosts=frozenset(images.hosts),
        ),
    )


def add_auxiliary_models(
    auxiliary: AuxiliaryModels,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
    workers: Pool | None = None,
) -> dict[str, tuple[PreTrainedModel, Any]]:
    """Load and serve them, on the policy's device and with its data type.

    Returns:
        Model and tokenizer of each one served here, by name.
    """
    loaded: dict[str, tuple[PreTrainedModel, Any]] = {}
    for index, settings in enumerate(config.explorer.auxiliary_models):
        where = f"explorer.auxiliary_models[{index}]"
        model = load_model(
            settings.model_path,
            device=device,
            dtype=dtype,
            setting=f"{where}.model_path",
        )
        tokenizer = load_tokenizer(settings.model_path, setting=f"{where}.model_path")
        model.requires_grad_(False)
        loaded[settings.name] = model, tokenizer
        renderer = ChatRenderer(
            tokenizer,
            chat_template=settings.chat_template,
            enable_thinking=settings.enable_thinking,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            end_ids=end_ids_of(model.generation_config, tokenizer),
        )
        stop_at_turns(model, tokenizer, renderer.end_ids)
        engine = TransformersEngine(
            model,
            tokenizer,
            max_model_len=context_length(
                settings.max_model_len, model.config, f"{where}.max_model_len"
            ),
            max_slots=config.tuner.max_slots,
            deterministic=config.tuner.deterministic,
        )
        opening = opening_of(workers, index + 1)
        auxiliary.add_local(
            settings.name,
            Gateway(engine, renderer, model_name=settings.model_path, opening=opening),
            SamplingDefaults(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                max_tokens=settings.max_response_tokens,
            ),
        )
    for name, remote in config.tuner.auxiliary_models.items():
        auxiliary.add_remote(name, remote)
    return loaded


def context_length(wanted: int | None, settings: Any, setting: str) -> int:
    """Maximum tokens of prompt and answer together.

    Args:
        wanted: The value that was set, or None for the model's maximum.
        settings: The model's `config.json`.
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: It exceeds the model's positions or the length that can be computed in batches
            (`length_limit`), with any engine; or the model does not specify its maximum.
    """
    text = settings.get_text_config(decoder=True)
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    limit = length_limit(settings)
    if wanted is None:
        if not positions:
            raise ConfigError(f"{setting} must be set: the model does not specify its maximum")
        if limit is None or positions <= limit[0]:
            return positions
        _log.warning("%s is not set and becomes %d: %s", setting, *limit)
        return limit[0]
    if positions and wanted > positions:
        raise ConfigError(
            f"{setting} = {wanted} is more than the {positions} positions this model was made for"
        )
    if limit is not None and wanted > limit[0]:
        raise ConfigError(f"{setting} = {wanted}, but {limit[1]}: set it to {limit[0]} at most")
    return wanted

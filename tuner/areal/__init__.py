"""AReaL-style agents, environments and token-level workflows, on the same gateway and trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.areal.actor import AllocationMode, FinetuneSpec, PPOActor, WeightUpdateMeta
    from tuner.areal.agents import AgentWorkflow
    from tuner.areal.experiment import (
        AgentExperiment,
        DatasetConfig,
        GRPOConfig,
        InferenceEngineConfig,
        OptimizerConfig,
        PPOActorConfig,
        load_expr_config,
    )
    from tuner.areal.hyperparameters import GenerationHyperparameters, setting
    from tuner.areal.queue_workflow import (
        AgentAbstraction,
        EnvServiceAbstraction,
        GymnasiumEnvironment,
        QueueWorkflow,
        configured_agent,
        make_agent,
        make_environment,
        register_agent,
        register_environment,
    )
    from tuner.areal.queues import (
        Agent,
        BundledGenerationOutputs,
        EnvironmentFault,
        EnvironmentService,
        SequenceSample,
    )
    from tuner.areal.rollout_engine import RolloutEngine, StatefulDataLoader
    from tuner.areal.shared_run import Run
    from tuner.areal.token_workflow import (
        InferenceEngine,
        ModelRequest,
        ModelResponse,
        RolloutWorkflow,
        SessionEngine,
        TokenWorkflow,
    )
    from tuner.areal.trajectories import concat_padded_tensors, tensor_container_to
    from tuner.areal.trajectory_batch import TrajectoryBatch

# Imported on first use: a configuration is read without PyTorch.
_MODULES = {
    "tuner.areal.actor": (
        "AllocationMode",
        "FinetuneSpec",
        "PPOActor",
        "WeightUpdateMeta",
    ),
    "tuner.areal.agents": ("AgentWorkflow",),
    "tuner.areal.experiment": (
        "AgentExperiment",
        "DatasetConfig",
        "GRPOConfig",
        "InferenceEngineConfig",
        "OptimizerConfig",
        "PPOActorConfig",
        "load_expr_config",
    ),
    "tuner.areal.hyperparameters": (
        "GenerationHyperparameters",
        "setting",
    ),
    "tuner.areal.queue_workflow": (
        "AgentAbstraction",
        "EnvServiceAbstraction",
        "GymnasiumEnvironment",
        "QueueWorkflow",
        "configured_agent",
        "make_agent",
        "make_environment",
        "register_agent",
        "register_environment",
    ),
    "tuner.areal.queues": (
        "Agent",
        "BundledGenerationOutputs",
        "EnvironmentFault",
        "EnvironmentService",
        "SequenceSample",
    ),
    "tuner.areal.rollout_engine": (
        "RolloutEngine",
        "StatefulDataLoader",
    ),
    "tuner.areal.shared_run": ("Run",),
    "tuner.areal.token_workflow": (
        "InferenceEngine",
        "ModelRequest",
        "ModelResponse",
        "RolloutWorkflow",
        "SessionEngine",
        "TokenWorkflow",
    ),
    "tuner.areal.trajectories": (
        "concat_padded_tensors",
        "tensor_container_to",
    ),
    "tuner.areal.trajectory_batch": ("TrajectoryBatch",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Agent",
    "AgentAbstraction",
    "AgentExperiment",
    "AgentWorkflow",
    "AllocationMode",
    "BundledGenerationOutputs",
    "DatasetConfig",
    "EnvServiceAbstraction",
    "EnvironmentFault",
    "EnvironmentService",
    "FinetuneSpec",
    "GRPOConfig",
    "GenerationHyperparameters",
    "GymnasiumEnvironment",
    "InferenceEngine",
    "InferenceEngineConfig",
    "ModelRequest",
    "ModelResponse",
    "OptimizerConfig",
    "PPOActor",
    "PPOActorConfig",
    "QueueWorkflow",
    "RolloutEngine",
    "RolloutWorkflow",
    "Run",
    "SequenceSample",
    "SessionEngine",
    "StatefulDataLoader",
    "TokenWorkflow",
    "TrajectoryBatch",
    "WeightUpdateMeta",
    "concat_padded_tensors",
    "configured_agent",
    "load_expr_config",
    "make_agent",
    "make_environment",
    "register_agent",
    "register_environment",
    "setting",
    "tensor_container_to",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tuner.areal' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

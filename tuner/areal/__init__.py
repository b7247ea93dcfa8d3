"""AReaL-style agents, environments and token-level workflows, on the same gateway and trainer."""

from tuner.areal.actor import PPOActor
from tuner.areal.agents import AgentWorkflow
from tuner.areal.batch import TrajectoryBatch
from tuner.areal.config import (
    AgentExperiment,
    DatasetConfig,
    GRPOConfig,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    load_expr_config,
)
from tuner.areal.dataloader import StatefulDataLoader
from tuner.areal.engine import InferenceEngine, SessionEngine
from tuner.areal.episodes import RolloutWorkflow, TokenWorkflow
from tuner.areal.gym import GymnasiumEnvironment
from tuner.areal.queue_workflow import QueueWorkflow, configured_agent
from tuner.areal.queues import (
    Agent,
    BundledGenerationOutputs,
    EnvironmentFault,
    EnvironmentService,
)
from tuner.areal.registry import (
    AgentAbstraction,
    EnvServiceAbstraction,
    make_agent,
    make_environment,
    register_agent,
    register_environment,
)
from tuner.areal.requests import GenerationHyperparameters, ModelRequest, ModelResponse
from tuner.areal.rollout import RolloutEngine
from tuner.areal.run import Run
from tuner.areal.samples import SequenceSample
from tuner.areal.tensors import concat_padded_tensors, tensor_container_to
from tuner.areal.weights import AllocationMode, FinetuneSpec, WeightUpdateMeta

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
    "tensor_container_to",
]

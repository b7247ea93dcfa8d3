"""AReaL-style agents, environments and token-level workflows, on the same gateway and trainer."""

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
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    SessionEngine,
    TokenWorkflow,
)
from tuner.areal.trajectories import concat_padded_tensors, tensor_container_to
from tuner.areal.trajectory_batch import TrajectoryBatch

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

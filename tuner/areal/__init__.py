"""AReaL-style agents, environments and token-level workflows, on the same gateway and trainer."""

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
from tuner.areal.samples import SequenceSample
from tuner.areal.tensors import concat_padded_tensors, tensor_container_to

__all__ = [
    "Agent",
    "AgentAbstraction",
    "BundledGenerationOutputs",
    "EnvServiceAbstraction",
    "EnvironmentFault",
    "EnvironmentService",
    "GenerationHyperparameters",
    "GymnasiumEnvironment",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "QueueWorkflow",
    "RolloutWorkflow",
    "SequenceSample",
    "SessionEngine",
    "TokenWorkflow",
    "concat_padded_tensors",
    "configured_agent",
    "make_agent",
    "make_environment",
    "register_agent",
    "register_environment",
    "tensor_container_to",
]

"""AReaL-style agents, environments and token-level workflows, on the same gateway and trainer."""

from tuner.areal.engine import InferenceEngine, SessionEngine
from tuner.areal.episodes import RolloutWorkflow, TokenWorkflow
from tuner.areal.requests import GenerationHyperparameters, ModelRequest, ModelResponse
from tuner.areal.tensors import concat_padded_tensors, tensor_container_to

__all__ = [
    "GenerationHyperparameters",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
    "SessionEngine",
    "TokenWorkflow",
    "concat_padded_tensors",
    "tensor_container_to",
]

"""Engines turn prompt ids into completion ids, with a known version of the weights."""

from tuner.engines.base import (
    Engine,
    EngineCapabilities,
    EngineError,
    EngineLostError,
    EngineStats,
    Generation,
    SamplingParams,
    TrainingEngine,
)

__all__ = [
    "Engine",
    "EngineCapabilities",
    "EngineError",
    "EngineLostError",
    "EngineStats",
    "Generation",
    "SamplingParams",
    "TrainingEngine",
]

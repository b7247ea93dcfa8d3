"""Engines: completion ids from prompt ids, with some version of the weights."""

from tuner.engines.base import Engine, EngineCapabilities, EngineError, Generation, SamplingParams

__all__ = ["Engine", "EngineCapabilities", "EngineError", "Generation", "SamplingParams"]

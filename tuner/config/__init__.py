"""The run configuration: Trinity-RFT's YAML keys, our own under `tuner`, and overrides."""

from tuner.config.schema import RemoteModel, RunConfig

__all__ = ["RemoteModel", "RunConfig"]

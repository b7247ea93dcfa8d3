"""The run configuration: Trinity-RFT's YAML keys, our own under `tuner`, and overrides."""

from tuner.config.load import load_config
from tuner.config.schema import RemoteModel, RunConfig

__all__ = ["RemoteModel", "RunConfig", "load_config"]

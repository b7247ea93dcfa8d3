"""`TunerModelConfig`: the model and how it is sampled, as in AgentScope 1.x."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from tuner.data.dataset import PublicSettings
from tuner.errors import ConfigError

# Field -> key in the configuration.
_POLICY_KEYS = {
    "model_path": "model.model_path",
    "max_model_len": "model.max_model_len",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "max_tokens": "model.max_response_tokens",
    "enable_thinking": "model.enable_thinking",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
    "inference_engine_num": "explorer.rollout_model.engine_num",
    "tool_call_parser": "explorer.rollout_model.tool_call_parser",
    "reasoning_parser": "explorer.rollout_model.reasoning_parser",
}
_AUXILIARY_NAMES = {"max_tokens": "max_response_tokens", "inference_engine_num": "engine_num"}


class TunerModelConfig(PublicSettings):
    """A model: the policy, or an auxiliary model. Only fields that are given override the file."""

    model_path: str = Field(min_length=1, description="Folder or Hub name of the model.")
    max_model_len: int = Field(ge=2, description="Tokens of prompt and answer together.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus mass.")
    max_tokens: int = Field(default=8192, ge=1, description="Tokens for one answer.")
    enable_thinking: bool | None = Field(
        default=None, description="Given to the chat template; None leaves it to the template."
    )
    tensor_parallel_size: int = Field(default=1, description="1 on one machine.")
    inference_engine_num: int = Field(default=1, description="1 on one machine.")
    tool_call_parser: str = Field(default="hermes", description="Reads tool calls.")
    reasoning_parser: str = Field(default="deepseek_r1", description="Reads `<think>`.")
    tinker_config: Any = Field(
        default=None,
        description="A TinkerConfig of AgentScope or Trinity-RFT, or a mapping like it: Tinker's "
        "service samples and trains (backend trinity).",
    )

    def policy_settings(self) -> dict[str, Any]:
        """What was given, by dotted key, for the model that is trained.

        Raises:
            ConfigError: `tinker_config` is of another type.
        """
        given = {_POLICY_KEYS[name]: getattr(self, name) for name in self._given()}
        if self.tinker_config is not None:
            tinker = {**_as_mapping(self.tinker_config), "enable": True}
            given |= {f"model.tinker.{name}": value for name, value in tinker.items()}
        return given

    def auxiliary_settings(self) -> dict[str, Any]:
        """What was given, by key of `explorer.auxiliary_models[]`.

        Raises:
            ConfigError: `tinker_config` was given.
        """
        if self.tinker_config is not None:
            raise ConfigError(
                "TunerModelConfig.tinker_config is set for an auxiliary model: Tinker samples "
                "these where it trains the policy; remove it here"
            )
        return {_AUXILIARY_NAMES.get(name, name): getattr(self, name) for name in self._given()}

    def _given(self) -> list[str]:
        return [name for name in _POLICY_KEYS if name in self.model_fields_set]


def _as_mapping(given: Any) -> dict[str, Any]:
    if isinstance(given, BaseModel):
        return given.model_dump()
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    if isinstance(given, Mapping):
        return dict(given)
    raise ConfigError(
        f"TunerModelConfig.tinker_config is {given!r:.60}: give a TinkerConfig, or a "
        "mapping with rank, seed, train_mlp, train_attn, train_unembed, base_url"
    )

"""`provider/model`, as LiteLLM and DSPy name models, as a URL and the name of a key's variable."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tuner.config import RemoteModel
from tuner.errors import ConfigError


@dataclass(frozen=True)
class Provider:
    """Where a provider's models are.

    Attributes:
        base_url: Of its OpenAI-compatible API.
        key: Environment variable that holds the API key; None where none is needed.
        base_url_variables: Environment variables with another URL, of which the first that is set
            wins.
    """

    base_url: str
    key: str | None
    base_url_variables: tuple[str, ...] = ()


PROVIDERS = {
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "dashscope": Provider(
        "https://dashscope.aliyuncs.com/compatible-mode/v1",
        "DASHSCOPE_API_KEY",
        ("DASHSCOPE_API_BASE",),
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", ("DEEPSEEK_API_BASE",)),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "ollama": Provider("http://localhost:11434/v1", None, ("OLLAMA_API_BASE",)),
    "openai": Provider(
        "https://api.openai.com/v1", "OPENAI_API_KEY", ("OPENAI_BASE_URL", "OPENAI_API_BASE")
    ),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together_ai": Provider("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
}


def remote_named(name: str) -> RemoteModel:
    """The model that `provider/model` stands for.

    Raises:
        ConfigError: There is no such provider here.
    """
    provider, _, model = name.partition("/")
    found = PROVIDERS.get(provider)
    if found is None or not model:
        raise ConfigError(
            f"PromptTuneConfig.lm_model_name is {name!r}: give provider/model with a provider of "
            f"{', '.join(PROVIDERS)}, or set reflection_model to a RemoteModel(base_url=..., "
            "model_name=..., api_key_env=...)"
        )
    urls = (os.environ.get(variable) for variable in found.base_url_variables)
    url = next(filter(None, urls), found.base_url)
    return RemoteModel(base_url=url, model_name=model, api_key_env=found.key)

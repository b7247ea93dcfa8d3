"""The gateway: speaks OpenAI to agents and token ids to an engine, and records calls."""

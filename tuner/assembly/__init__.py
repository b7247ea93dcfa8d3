"""From a configuration to the parts of a run: models, engine, gateway, trainer."""

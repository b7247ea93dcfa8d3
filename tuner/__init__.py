"""Train the model inside an agent."""

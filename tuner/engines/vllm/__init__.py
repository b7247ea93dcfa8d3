"""vLLM, in processes that we start or on machines that we connect to."""

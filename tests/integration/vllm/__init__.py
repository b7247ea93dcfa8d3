"""vLLM on a CPU."""

ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Two cores that others use: vLLM binds each of its threads to a core otherwise.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM's processes otherwise call g++ for helpers; our few tokens do not pay for that.
    "TORCH_COMPILE_DISABLE": "1",
}

"""What vLLM's workers do for us, through its `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.engines.vllm.ipc_handles import from_plain


class WeightsExtension:
    """Methods that vLLM adds to its worker class; `self` is that worker."""

    model_runner: Any
    update_weights: Callable[[dict[str, Any]], None]

    def tuner_receive_weights(self, info: dict[str, Any]) -> None:
        """Take the weights that `info` tells of: to be broadcast, or in memory that is shared."""
        if "ipc_handles" in info:
            info = {**info, "ipc_handles": [from_plain(one) for one in info["ipc_handles"]]}
        self.update_weights(info)

    def tuner_load_weights(self, folder: str) -> None:
        """Load a model's folder in place, in whatever form vLLM keeps the weights."""
        self.model_runner.reload_weights(weights_path=folder)
        self._pack_output_layers_again()

    def _pack_output_layers_again(self) -> None:
        # On a CPU vLLM multiplies with packed copies. Its reload makes new ones where a layer's
        # weights were in the checkpoint, which those of an output layer tied to the embeddings are
        # not: 0.32 went on with the old ones.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

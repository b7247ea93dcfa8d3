"""Lets Trinity-RFT 0.6's vLLM engine run on vLLM's CPU platform, with one worker. For tests alone.

vLLM loads it in each of its processes, through the entry point `vllm.general_plugins`. Trinity-RFT
names a GPU worker and moves weights over a "cuda" device; both are put on the CPU here, and nothing
else is changed.
"""


def vllm_plugin():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from trinity.common.models import vllm_extension, vllm_worker
    from vllm.lora.punica_wrapper import utils as lora_utils
    from vllm.v1.worker.cpu_worker import CPUWorker

    vllm_worker.TrinityGPUWorker.__bases__ = (CPUWorker,)
    engine = vllm_extension.CheckpointWeightTransferEngine

    def init_transfer_engine(self, init_info):
        assert init_info.world_size == 1, "one worker only"
        self.model_update_group = object()
        self._sync_method = init_info.sync_method
        self._namespace = init_info.namespace
        self._synchronizer = None

    def receive_weights(self, update_info, load_weights):
        assert self._sync_method == "checkpoint", self._sync_method
        folder = update_info.checkpoint_path
        for item in vllm_extension.load_state_dict_iterator(checkpoint_dir=folder):
            load_weights([item])

    # Memory is pinned for GPUs, which there are none; the default is that of `pin_memory`.
    lora_utils.async_tensor_h2d.__defaults__ = (False,)
    engine.init_transfer_engine = init_transfer_engine
    engine.receive_weights = receive_weights

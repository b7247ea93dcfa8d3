"""vLLM as a recorder, for what a CPU cannot do."""


class Recorder:
    """Stands in for vLLM's `AsyncLLM`: memory, weights and requests, as far as they are its."""

    def __init__(self):
        self.did = []
        self.errored = False
        self.fails = None

    def note(self, what):
        self.did.append(what)
        if what == self.fails:
            raise RuntimeError("out of memory")

    async def sleep(self, level):
        self.note(f"sleep {level}")

    async def wake_up(self, tags):
        self.note(f"wake {' '.join(tags)}")

    async def collective_rpc(self, method, args):
        self.note("load weights" if method == "tuner_load_weights" else f"receive {args[0]}")

    async def add_lora(self, adapter):
        self.note(f"add {adapter.lora_name} as {adapter.lora_int_id}")

    async def remove_lora(self, number):
        self.note(f"remove {number}")

    async def start_weight_update(self):
        self.note("start")

    async def finish_weight_update(self):
        self.note("finish")

    async def reset_prefix_cache(self):
        self.note("forget")
        return True

    def shutdown(self):
        pass

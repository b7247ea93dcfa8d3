"""A server on a machine of its own: `python serve_engine.py ADDRESS MODEL ENGINE`.

ENGINE is `vllm`, or `transformers` for an engine over that in vLLM's place.
"""

import sys

from transformers import AutoTokenizer

from tests.engines.elsewhere import ToyHost, listening, serve
from tests.engines.local_server import LocalServer
from tuner.engines.vllm.server import VllmHost

LOADED = "serve_engine has loaded"


class Noting(VllmHost):
    """Says what it loads."""

    async def _serve(self, settings, weights) -> None:
        await super()._serve(settings, weights)
        print(LOADED, weights.label, flush=True)


class NotingToy(Noting, ToyHost):
    """With an engine over transformers."""


def main(address: str, model: str, engine: str) -> None:
    if engine == "vllm":
        host: VllmHost = Noting()
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        host = NotingToy(LocalServer(tokenizer=tokenizer, max_model_len=512))
    door = listening(address, 8100)
    serve(host, door).run([door])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A server on a machine of its own: `python serve_engine.py ADDRESS MODEL LABELS ENGINE`.

ENGINE is `vllm`, or `transformers` for an engine over that in vLLM's place. Each set of weights
that it has loaded is a line in the file LABELS.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from tests.engines.elsewhere import ToyHost, listening, serve
from tests.engines.local_server import LocalServer
from tuner.engines.vllm.server import VllmHost


class Noting(VllmHost):
    """Says what it loads."""

    async def _serve(self, settings, weights) -> None:
        await super()._serve(settings, weights)
        with Path(sys.argv[3]).open("a", encoding="utf-8") as file:  # noqa: ASYNC230
            file.write(weights.label + "\n")


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
    main(sys.argv[1], sys.argv[2], sys.argv[4])

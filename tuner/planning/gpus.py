"""Costs of GPUs that no run was measured on: what was measured once on an H100, and data sheets.

Measured (one H100 SXM, Qwen3 of 0.6B and 1.7B, `benchmarks/results/gpu/slice_2.json` and
`slice_3.json`): seconds of an update by unique tokens, and of a pass of the engine over
transformers by its answers. Everything else follows from sizes and data sheets, and is assumed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tuner.config.model_paths import located, require_gguf
from tuner.errors import ConfigError
from tuner.planning.step_model import Costs

# Dense bfloat16 TFLOPS and TB/s of memory, of NVIDIA's data sheets.
GPUS = {
    "B200": (2250, 8.0),
    "H200": (989, 4.8),
    "H100": (989, 3.35),
    "A100": (312, 2.04),
    "L40S": (362, 0.864),
    "L4": (121, 0.3),
    "RTX4090": (165, 1.01),
}
_H100 = GPUS["H100"]
# Seconds of an update on an H100: whatever is in it, of a token, and of a token for each billion
# parameters: what comes closest to the six updates of slice_2.json.
UPDATE, TOKEN, TOKEN_BILLION = 0.1244, 1.017e-5, 1.306e-5
# Seconds of a pass of the engine over transformers on an H100, 0.6B: whatever is in it, and of an
# answer in it; of slice_3.json, distinct prompts, in the same way.
PASS, ANSWER = 5.413e-3, 5.608e-5
MEASURED_BILLIONS = (0.6, 1.7)
MEASURED = {  # beyond these nothing was seen
    "billions of parameters": MEASURED_BILLIONS,
    "rollouts at a time": (1, 64),
    "tokens of an update": (1885, 62_636),
}
# Assumed. Seconds of a pass of vLLM beyond reading the weights, and the part of a data sheet's
# numbers that is reached: of memory in a pass, of arithmetic in a prompt.
SERVER_PASS, OF_MEMORY, OF_ARITHMETIC = 2e-3, 0.7, 0.4
# Bytes of keys and values of a token in bfloat16: Qwen3 of 0.6B to 8B has 115 to 147 thousand.
CACHE_BYTES = 131_072
# Assumed. Bytes per second of weights on their way to engines; what each further trainer adds.
WEIGHTS_RATE, FURTHER_TRAINER = 1e10, 0.85


@dataclass(frozen=True)
class Hardware:
    """What the user has or thinks of buying.

    Attributes:
        gpu: One of `GPUS`.
        gpus: Of all nodes together.
    """

    gpu: str
    gpus: int

    @staticmethod
    def of(text: str, nodes: int) -> Hardware:
        """From `8xH100` (each node has so many), or `H100`.

        Raises:
            ConfigError: That is no such thing, or the GPU's numbers are not known here.
        """
        found = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w -]*)", text.strip())
        kind = found[2].upper().replace(" ", "").replace("-", "") if found else ""
        count = int(found[1] or 1) if found else 0
        if kind not in GPUS or not count:
            raise ConfigError(
                f"--gpus is {text!r}: say how many of which on each node, as 8xH100; known are "
                f"{', '.join(GPUS)}"
            )
        return Hardware(kind, count * nodes)


def billions(model: str) -> float | None:
    """Parameters of a model in billions, of its files or its name; None where neither says it."""
    place = located(model) if model else None
    if place is not None and place.is_file():
        require_gguf(model, "model.model_path")
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(place).tensors) / 1e9
    folder = place or Path(model)
    files = sorted(folder.glob("*.safetensors")) if place is not None else []
    if files:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        single = (about.get("dtype") or about.get("torch_dtype")) == "float32"
        return sum(file.stat().st_size for file in files) / (4e9 if single else 2e9)
    named = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", folder.name)
    return float(named[0]) if named else None


def costs_on(gpu: str, size: float, *, served: bool, tensor_parallel: int = 1) -> Costs:
    """Costs of a model on a GPU; those of agents and gateway are 0.

    Args:
        gpu: One of `GPUS`.
        size: Billions of parameters, in bfloat16.
        served: Whether vLLM generates; else the engine over transformers.
        tensor_parallel: GPUs of one engine, each of which reads its part.
    """
    arithmetic, memory = GPUS[gpu]
    reads = memory * 1e12 * OF_MEMORY * tensor_parallel
    computes = arithmetic * 1e12 * OF_ARITHMETIC * tensor_parallel
    weights = size * 2e9 / reads
    if served:
        step, sampled = SERVER_PASS + weights, 2e9 * size / computes
    else:
        slower = _H100[1] / memory
        step = PASS + max(0.0, size - MEASURED_BILLIONS[0]) * 2e9 / reads
        sampled = ANSWER * slower
    slower = _H100[0] / arithmetic
    return Costs(
        step=step,
        sampled=sampled,
        attended=CACHE_BYTES / reads,
        prefilled=2e9 * size / computes,
        update=UPDATE,
        trained=(TOKEN + TOKEN_BILLION * size) * slower,
        publish=size * 2e9 / WEIGHTS_RATE if served else 0.0,
    )


def trainers(count: int) -> float:
    """How many times as fast as one several GPUs train."""
    return 1 + (count - 1) * FURTHER_TRAINER

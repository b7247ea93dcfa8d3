"""The model card of an export: what was trained, on what, rewards before and after, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from tuner.commands.candidates import Candidate
from tuner.config.explorer import DEFAULT_RANK
from tuner.config.source import GGUF, PACKAGE, lookup
from tuner.run.directory import read_metrics

_LIBRARIES = ("agentscope-tuner", "torch", "transformers", "peft")


def model_card(candidate: Candidate, *, title: str, adapter: bool) -> ModelCard:
    """The card; paths of this machine are not in it, only their last part.

    Args:
        candidate: What is exported.
        title: Its heading.
        adapter: Whether the folder holds an adapter without its model.
    """
    config = {} if candidate.run is None else candidate.run.stored_config()
    base = candidate.base or lookup(config, "model.model_path")
    sets = [lookup(config, "buffer.explorer_input.taskset", {})]
    sets += lookup(config, "buffer.explorer_input.eval_tasksets", [])
    public = dict.fromkeys(str(one["path"]) for one in sets if _on_the_hub(one.get("path")))
    data = ModelCardData(
        base_model=base if _on_the_hub(base) else None,
        datasets=list(public) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["agentscope-tuner", *_kind(config), *(["lora"] if candidate.base else [])],
    )
    sections = [
        [f"# {title}", "", *_introduction(candidate, base)],
        list(_rewards(candidate)),
        list(_training(config)),
        list(_use(adapter, base)),
        list(_versions()),
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n", ignore_metadata_errors=True)


def _on_the_hub(path: Any) -> bool:
    """Whether a model or dataset has a name there; folders of this machine have none."""
    return (
        isinstance(path, str)
        and path.count("/") == 1
        and not path.startswith((".", "/", "~", PACKAGE))
        and not Path(path).exists()
    )


def _kind(config: Mapping[str, Any]) -> list[str]:
    return [] if not config or config.get("mode") == "train" else ["reinforcement-learning"]


def _short(path: Any) -> str:
    return str(path) if path is None or _on_the_hub(path) else Path(str(path)).name


def _introduction(candidate: Candidate, base: Any) -> Iterator[str]:
    what = "A LoRA adapter" if candidate.base else "All weights"
    if candidate.run is None:
        yield f"{what} of a checkpoint, exported with agentscope-tuner."
    else:
        step = "" if candidate.step is None else f", step {candidate.step}"
        yield (
            f"{what} of `{_short(base)}`, trained with agentscope-tuner inside an agent: run "
            f"`{candidate.run.path.name}`{step}."
        )


def _rewards(candidate: Candidate) -> Iterator[str]:
    """Of each evaluation set before training and at the checkpoint, and the training rewards."""
    if candidate.run is None:
        return
    up_to = 10**9 if candidate.step is None else candidate.step
    rows = read_metrics(candidate.run.metrics, up_to=up_to)
    names = dict.fromkeys(
        name
        for row in rows
        for name in row
        if name == "reward/mean" or (name.startswith("eval/") and name.endswith("/reward"))
    )
    if not names:
        return
    yield "## Rewards"
    yield ""
    yield "| mean reward | first | at step | last | at step |"
    yield "|---|---|---|---|---|"
    for name in sorted(names):
        found = [(row["step"], row[name]) for row in rows if name in row]
        what = "training tasks" if name == "reward/mean" else f"evaluation `{name.split('/')[1]}`"
        (first, before), (last, after) = found[0], found[-1]
        yield f"| {what} | {before:.3f} | {first} | {after:.3f} | {last} |"
    yield ""
    yield "Step 0 is before training. A rollout that failed has no reward and is in no mean."


def _training(config: Mapping[str, Any]) -> Iterator[str]:
    """The settings worth seeing."""
    if not config:
        return

    def of(key: str) -> Any:
        return lookup(config, key)

    recorded = config.get("mode") == "train"
    source = "trainer_input.experience_buffer" if recorded else "explorer_input.taskset"
    lora = lookup(config, "model.lora_configs", [])
    rows = {
        "algorithm": of("algorithm.algorithm_type"),
        "learning rate": of("algorithm.optimizer.lr"),
        "data": _data(lookup(config, f"buffer.{source}", {})),
        "evaluated on": ", ".join(
            _data(one) for one in lookup(config, "buffer.explorer_input.eval_tasksets", [])
        ),
        "rows per step" if recorded else "tasks per step": of("buffer.batch_size"),
        "rollouts per task": None if recorded else of("algorithm.repeat_times"),
        "temperature": None if recorded else of("model.temperature"),
        "context": of("model.max_model_len"),
        "LoRA": ", ".join(f"rank {one.get('lora_rank') or DEFAULT_RANK}" for one in lora),
        "workflow": _function(of("tuner.workflow")),
        "judge": _function(of("tuner.judge")),
        "thinking": of("model.enable_thinking"),
        "seed": of("tuner.seed"),
    }
    yield "## Training"
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    for name, value in rows.items():
        if value not in (None, ""):
            yield f"| {name} | {value} |"


def _data(source: Mapping[str, Any]) -> str:
    path = source.get("path")
    name = "rows in memory" if path is None else f"`{_short(path)}`"
    return f"{name}, split {source.get('split')}"


def _function(reference: Any) -> str | None:
    """`main.py:judge` of a path; a module's name as it is."""
    return None if reference is None else f"`{str(reference).rpartition('/')[2]}`"


def _use(adapter: bool, base: Any) -> Iterator[str]:
    yield "## Use"
    yield ""
    model = _short(base)
    yield "`FOLDER` is this folder, or its name on the Hub; the chat template is that of training."
    if adapter and (str(base).startswith(PACKAGE) or str(base).endswith(GGUF)):
        yield (
            f"`BASE` is `{model}` as a Hugging Face folder; `tuner export --merge` writes a model "
            "that needs none."
        )
        model = "BASE"
    yield ""
    yield "```"
    if adapter:
        yield f"vllm serve {model} --enable-lora --lora-modules tuned=FOLDER"
        yield f"python -m sglang.launch_server --model-path {model} --lora-paths tuned=FOLDER"
    else:
        yield "vllm serve FOLDER"
        yield "python -m sglang.launch_server --model-path FOLDER"
    yield "```"
    yield ""
    yield "```python"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    if adapter:
        yield "from peft import PeftModel"
        yield ""
        yield f'base = AutoModelForCausalLM.from_pretrained("{model}")'
        yield 'model = PeftModel.from_pretrained(base, "FOLDER")'
    else:
        yield 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'
    yield "```"


def _versions() -> Iterator[str]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    yield "## Versions"
    yield ""
    yield f"Exported with {', '.join(found)}."

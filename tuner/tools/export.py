"""`tuner export`: a checkpoint as a folder that vLLM, SGLang and transformers load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from tuner.config.keys import located
from tuner.config.schema import DEFAULT_RANK, FROZEN
from tuner.config.source import GGUF, PACKAGE, lookup
from tuner.encoding import NotText, read_text_file
from tuner.errors import ConfigError, TunerError, quiet_library
from tuner.runs.directory import MANIFEST, TRAINER_STATE, read_metrics
from tuner.tools.candidates import Candidate, find_candidate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PRECISIONS = ("float32", "bfloat16", "float16")
_CARD = "README.md"
_OF_THE_RUN = (TRAINER_STATE, MANIFEST, "version.json", _CARD)
"""Files of a checkpoint that are only needed to resume training."""


def export(
    source: str | Path,
    folder: Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    push: str | None = None,
    public: bool = False,
) -> tuple[Path, str | None]:
    """Write a checkpoint into a new folder, and optionally push it to the Hub.

    Args:
        source: A run (its newest checkpoint) or a checkpoint.
        folder: A new or empty folder.
        merge: Merge an adapter into its model, in float32; the result does not need peft.
        dtype: Data type of the weights. None keeps the checkpoint's; for a merged model, that of
            the model the adapter was trained on.
        push: `owner/name` of a repository on the Hub, created if missing, with the token of
            `hf auth login` or HF_TOKEN.
        public: Make a created repository public.

    Returns:
        The folder, and the URL of the commit on the Hub.
    """
    candidate = find_candidate(source)
    adapter = candidate.base is not None and not merge
    _check(candidate, merge=merge, dtype=dtype, push=push if adapter else None)
    with _filled(folder) as inside:
        if candidate.base is not None and merge:
            _save(candidate, _merged(candidate, dtype), inside)
        elif dtype is not None:
            _save(candidate, _loaded(candidate.path, dtype), inside)
        else:
            shutil.copytree(
                candidate.path,
                inside,
                ignore=shutil.ignore_patterns(*_OF_THE_RUN),
                # the checkpoint's files are readable only by their owner
                copy_function=shutil.copyfile,
                dirs_exist_ok=True,
            )
        _keep_template(candidate, inside)
        stops = _keep_ends(candidate, inside, adapter=adapter)
        title = folder.name if push is None else push.rpartition("/")[2]
        card = model_card(candidate, title=title, adapter=adapter, stops=stops)
        card.save(inside / _CARD)
    return folder, None if push is None else _push(folder, push, public=public)


def _check(candidate: Candidate, *, merge: bool, dtype: str | None, push: str | None) -> None:
    """Raise ConfigError if the options do not fit the checkpoint."""
    if dtype is not None and dtype not in PRECISIONS:
        raise ConfigError(f"dtype is {dtype!r}: give {', '.join(PRECISIONS)}, or omit it")
    if not Path(candidate.path).is_dir():
        raise ConfigError(f"folder {candidate.path} is missing: give that of a run or a checkpoint")
    if merge and candidate.base is None:
        raise ConfigError(
            f"{candidate.path} holds a full model, so there is nothing to merge: omit --merge"
        )
    if merge and candidate.roles:
        raise ConfigError(
            f"{candidate.path} has an adapter for each role: merge one of them, such as "
            f"{Path(candidate.path) / candidate.roles[0]}"
        )
    if dtype is not None and candidate.base is not None and not merge:
        raise ConfigError(
            f"{candidate.path} is an adapter, whose data type cannot be changed: add --merge, or "
            "omit --dtype"
        )
    if push is not None and candidate.base is not None and located(candidate.base) is not None:
        raise ConfigError(
            f"the adapter {candidate.path} belongs to {candidate.base}, a local model, so it could "
            "not be used from the Hub: add --merge"
        )


def _merged(candidate: Candidate, dtype: str | None) -> PreTrainedModel:
    """The base model with the adapter merged into its weights."""
    import torch

    from tuner.runs.models import load_settings, require_peft

    require_peft()
    from peft import PeftModel

    assert candidate.base is not None
    model = _loaded(candidate.base, "float32", load_vision=candidate.load_vision)
    with quiet_library("peft"):  # it uses deprecated names
        merged: Any = PeftModel.from_pretrained(model, candidate.path).merge_and_unload()
    own = load_settings(candidate.base).get_text_config().dtype or model.dtype
    whole: PreTrainedModel = merged.to(own if dtype is None else getattr(torch, dtype))
    return whole


def _loaded(path: str, dtype: str, *, load_vision: bool = False) -> PreTrainedModel:
    from tuner.runs.models import choose_device, choose_dtype, load_model

    device = choose_device("cpu")
    precision = choose_dtype(dtype, device)
    return load_model(path, device=device, dtype=precision, load_vision=load_vision)


def _save(candidate: Candidate, model: PreTrainedModel, folder: Path) -> None:
    from tuner.runs.models import load_tokenizer, save_model

    save_model(model, load_tokenizer(candidate.path), folder)


def _keep_template(candidate: Candidate, folder: Path) -> None:
    """Set the tokenizer's chat template to the one that the run used."""
    config = {} if candidate.run is None else candidate.run.stored_config()
    template = lookup(config, "model.custom_chat_template")
    if (path := lookup(config, "model.chat_template_path")) is not None:
        try:
            template = read_text_file(Path(path))
        except (OSError, NotText) as error:
            raise TunerError(
                f"cannot read {path}, the chat template of the run (model.chat_template_path): "
                f"{getattr(error, 'strerror', error)}; restore the file"
            ) from error
    if template is None:
        return
    from tuner.runs.models import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _keep_ends(candidate: Candidate, folder: Path, *, adapter: bool) -> bool:
    """Name every token that ends a completion in the generation settings of an export.

    Returns:
        Whether an adapter has settings that differ from its model's.
    """
    from transformers import GenerationConfig

    from tuner.gateway.families.renderer import turn_end_ids
    from tuner.gateway.families.template import template_form
    from tuner.runs.models import load_settings, load_tokenizer, model_folder, stopping

    tokenizer = load_tokenizer(str(folder))
    ends = frozenset[int]()
    if tokenizer.chat_template is not None:
        apply = partial(tokenizer.apply_chat_template, tokenize=False)
        ends = turn_end_ids(tokenizer, apply, template_form(apply, "none"))
    path = str(candidate.base) if adapter else str(folder)
    try:
        settings = GenerationConfig.from_pretrained(model_folder(path))
    except OSError:  # there are none
        settings = GenerationConfig.from_model_config(load_settings(path))
    changed = stopping(settings, tokenizer, ends)
    if changed is not None:
        changed.save_pretrained(folder)
    return adapter and changed is not None


@contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """Yield a folder next to `folder` that is renamed to it once complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    inside = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir(parents=True)
        yield inside
        inside.replace(folder)  # replaces an empty folder of that name
    except OSError as error:
        if isinstance(error, TunerError):
            raise
        raise TunerError(
            f"cannot write {folder}: {error.strerror or error}; free space there, or name another "
            "folder"
        ) from error
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder; returns the URL of the commit."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Exported with agentscope-tuner"
        )
    # includes errors of its HTTP library, which differs between versions
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise TunerError(
            f"--push {name}: {first}; log in with `hf auth login`, or set HF_TOKEN to a token with "
            f"write access. The export is in {folder}"
        ) from error
    return str(done.commit_url)


# The model card of an export: what was trained, on what, rewards before and after, versions.


_LIBRARIES = ("agentscope-tuner", "torch", "transformers", "peft")


def model_card(
    candidate: Candidate, *, title: str, adapter: bool, stops: bool = False
) -> ModelCard:
    """The model card; local paths are reduced to their last part.

    Args:
        candidate: The exported checkpoint.
        title: The card's heading.
        adapter: True if the folder holds an adapter without its model.
        stops: True if the adapter has its own generation settings.
    """
    config = {} if candidate.run is None else candidate.run.stored_config()
    base = candidate.base or lookup(config, "model.model_path")
    images = any(Path(candidate.path).rglob("*processor_config.json"))
    sets = [lookup(config, "buffer.explorer_input.taskset", {})]
    sets += lookup(config, "buffer.explorer_input.eval_tasksets", [])
    public = dict.fromkeys(str(one["path"]) for one in sets if _on_the_hub(one.get("path")))
    data = ModelCardData(
        base_model=base if _on_the_hub(base) else None,
        datasets=list(public) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text" if images else "text-generation",
        tags=["agentscope-tuner", *_kind(config), *(["lora"] if candidate.base else [])],
    )
    sections = [
        [f"# {title}", "", *_introduction(candidate, base)],
        list(_rewards(candidate)),
        list(_training(config)),
        list(_use(adapter, base, stops, candidate.roles, images=images)),
        list(_versions()),
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n", ignore_metadata_errors=True)


def _on_the_hub(path: Any) -> bool:
    """True if a model or dataset has a name on the Hub; False for local folders."""
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
    if candidate.roles:
        what = f"LoRA adapters for the roles {', '.join(candidate.roles)}, one in each folder,"
    if candidate.run is None:
        yield f"{what} of a checkpoint, exported with agentscope-tuner."
    else:
        step = "" if candidate.step is None else f", step {candidate.step}"
        yield (
            f"{what} of `{_short(base)}`, trained with agentscope-tuner inside an agent: run "
            f"`{candidate.run.path.name}`{step}."
        )


def _rewards(candidate: Candidate) -> Iterator[str]:
    """Rewards of each evaluation set before training and at the checkpoint, and training
    rewards."""
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
    yield "Step 0 is before training. Failed rollouts have no reward and are in no mean."


def _training(config: Mapping[str, Any]) -> Iterator[str]:
    """The main settings."""
    if not config:
        return

    def of(key: str) -> Any:
        return lookup(config, key)

    recorded = config.get("mode") == "train"
    source = "trainer_input.experience_buffer" if recorded else "explorer_input.taskset"
    lora = lookup(config, "model.lora_configs", [])
    lora = lora or [one for one in lookup(config, "model.adapters", {}).values() if one != FROZEN]
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
    """`main.py:judge` for a path; a module's name unchanged."""
    return None if reference is None else f"`{str(reference).rpartition('/')[2]}`"


def _use(
    adapter: bool, base: Any, stops: bool, roles: Sequence[str] = (), *, images: bool = False
) -> Iterator[str]:
    yield "## Use"
    yield ""
    model = _short(base)
    yield "`FOLDER` is this folder or its name on the Hub; the chat template is that of training."
    if adapter and (str(base).startswith(PACKAGE) or str(base).endswith(GGUF)):
        yield (
            f"`BASE` is `{model}` as a Hugging Face folder; `tuner export --merge` writes a model "
            "that does not need it."
        )
        model = "BASE"
    yield ""
    yield "```"
    if adapter:
        settings = " --generation-config FOLDER" if stops else ""
        named = " ".join(f"{role}=FOLDER/{role}" for role in roles) or "tuned=FOLDER"
        yield f"vllm serve {model} --enable-lora --lora-modules {named}{settings}"
        yield f"python -m sglang.launch_server --model-path {model} --lora-paths {named}"
    else:
        yield "vllm serve FOLDER"
        yield "python -m sglang.launch_server --model-path FOLDER"
    yield "```"
    yield ""
    yield "```python"
    more = ", GenerationConfig" if stops else ""
    loader = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    reader = "AutoProcessor" if images else "AutoTokenizer"
    yield f"from transformers import {loader}, {reader}{more}"
    yield ""
    if adapter:
        yield "from peft import PeftModel"
        yield ""
        yield f'base = {loader}.from_pretrained("{model}")'
        first, *others = roles or ("",)
        named = f'/{first}", adapter_name="{first}' if first else ""
        yield f'model = PeftModel.from_pretrained(base, "FOLDER{named}")'
        for role in others:
            yield f'model.load_adapter("FOLDER/{role}", adapter_name="{role}")'
        if stops:
            yield 'model.generation_config = GenerationConfig.from_pretrained("FOLDER")'
    else:
        yield f'model = {loader}.from_pretrained("FOLDER")'
    yield f'{"processor" if images else "tokenizer"} = {reader}.from_pretrained("FOLDER")'
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

"""`tuner export`: a checkpoint as a folder that vLLM, SGLang and transformers load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands.candidates import Candidate, find_candidate
from tuner.config.model_paths import located
from tuner.config.source import lookup
from tuner.errors import ConfigError, TunerError
from tuner.run.directory import MANIFEST, TRAINER_STATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRECISIONS = ("float32", "bfloat16", "float16")
_CARD = "README.md"
_OF_THE_RUN = (TRAINER_STATE, MANIFEST, "version.json", _CARD)
"""What a checkpoint holds to go on training with."""


def export(
    source: str | Path,
    folder: Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    push: str | None = None,
    public: bool = False,
) -> tuple[Path, str | None]:
    """Write a checkpoint into a new folder, and where that is asked for to the Hub.

    Args:
        source: A run (its newest checkpoint) or a checkpoint.
        folder: A new folder, or an empty one.
        merge: Add an adapter to its model, in float32, which gives a model that needs no peft.
        dtype: Of the weights. None: as they are in the checkpoint; of a merged model as in the
            model that the adapter was trained on.
        push: `owner/name` of a repository on the Hub, which is made if it is not there, with the
            token of `hf auth login` or HF_TOKEN.
        public: Whether one that is made can be read by everybody.

    Returns:
        The folder, and the address of the commit on the Hub.

    Raises:
        TunerError: The source is no checkpoint, the folder is not empty, or the Hub refuses.
        ConfigError: An option does not fit what is exported.
        ModelLoadError: The weights cannot be loaded.
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
                copy_function=shutil.copyfile,  # the checkpoint's are for its owner alone
                dirs_exist_ok=True,
            )
        _keep_template(candidate, inside)
        from tuner.commands.card import model_card

        title = folder.name if push is None else push.rpartition("/")[2]
        model_card(candidate, title=title, adapter=adapter).save(inside / _CARD)
    return folder, None if push is None else _push(folder, push, public=public)


def _check(candidate: Candidate, *, merge: bool, dtype: str | None, push: str | None) -> None:
    """Raises ConfigError where what was asked for is not possible."""
    if dtype is not None and dtype not in PRECISIONS:
        raise ConfigError(f"dtype is {dtype!r}: give {', '.join(PRECISIONS)}, or leave it out")
    if not Path(candidate.path).is_dir():
        raise ConfigError(
            f"there is no folder {candidate.path}: give that of a run or of a checkpoint"
        )
    if merge and candidate.base is None:
        raise ConfigError(
            f"{candidate.path} holds all weights, so there is nothing to merge: leave --merge out"
        )
    if dtype is not None and candidate.base is not None and not merge:
        raise ConfigError(
            f"{candidate.path} is an adapter, which stays as it was trained: add --merge, or leave "
            "--dtype out"
        )
    if push is not None and candidate.base is not None and located(candidate.base) is not None:
        raise ConfigError(
            f"the adapter {candidate.path} belongs to {candidate.base}, a model of this machine, "
            "so nobody could use it from the Hub: add --merge"
        )


def _merged(candidate: Candidate, dtype: str | None) -> PreTrainedModel:
    """The model that an adapter belongs to, with the adapter in its weights."""
    import torch

    from tuner.assembly.adapters import require_peft
    from tuner.assembly.models import load_settings

    require_peft()
    from peft import PeftModel

    assert candidate.base is not None
    model = _loaded(candidate.base, "float32")
    merged: Any = PeftModel.from_pretrained(model, candidate.path).merge_and_unload()
    own = load_settings(candidate.base).get_text_config().dtype or model.dtype
    whole: PreTrainedModel = merged.to(own if dtype is None else getattr(torch, dtype))
    return whole


def _loaded(path: str, dtype: str) -> PreTrainedModel:
    from tuner.assembly.models import choose_device, choose_dtype, load_model

    device = choose_device("cpu")
    return load_model(path, device=device, dtype=choose_dtype(dtype, device))


def _save(candidate: Candidate, model: PreTrainedModel, folder: Path) -> None:
    from tuner.assembly.models import load_tokenizer, save_model

    save_model(model, load_tokenizer(candidate.path), folder)


def _keep_template(candidate: Candidate, folder: Path) -> None:
    """Give the tokenizer the chat template that the run set in place of its own."""
    config = {} if candidate.run is None else candidate.run.stored_config()
    template = lookup(config, "model.custom_chat_template")
    if (path := lookup(config, "model.chat_template_path")) is not None:
        try:
            template = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise TunerError(
                f"{path}, the chat template of the run (model.chat_template_path), cannot be "
                f"read: {error.strerror}; put it back there"
            ) from error
    if template is None:
        return
    from tuner.assembly.models import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that gets its name once it is complete.

    Raises:
        ConfigError: There is something in `folder`.
        TunerError: It cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty: name a new folder")
    inside = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir(parents=True)
        yield inside
        inside.replace(folder)  # an empty folder of that name goes
    except OSError as error:
        if isinstance(error, TunerError):
            raise
        raise TunerError(
            f"{folder} cannot be written: {error.strerror or error}; make room there, or name "
            "another folder"
        ) from error
    finally:
        shutil.rmtree(inside, ignore_errors=True)


def _push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder; gives the address of the commit.

    Raises:
        TunerError: The Hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Exported with agentscope-tuner"
        )
    except Exception as error:  # of its HTTP library too, which is another one in each version
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise TunerError(
            f"--push {name}: {first}; log in with `hf auth login` or set HF_TOKEN to a token that "
            f"may write there. The export is in {folder}"
        ) from error
    return str(done.commit_url)

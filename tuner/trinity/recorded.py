"""Recorded data in the one form in which Trinity-RFT's trainer reads it without guessing.

A row may say the same in many ways (docs/offline.md): text or messages, lists or JSON text, columns
by any name. Trinity-RFT finds out about a row that it cannot read in the middle of a run; so every
row is read here first, as on the local backend, and written as messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tuner.config.buffer import FormatSection
from tuner.config.problems import describe
from tuner.data.recorded import SETTING, conversation, pair
from tuner.errors import ConfigError, DatasetError

# Columns of pictures, which are given to Trinity-RFT as they are.
_OTHER_MEDIA = ("image_key", "video_key")


def is_text(algorithm: str, form: Mapping[str, Any]) -> bool:
    """Whether the rows of an algorithm are conversations, or pairs of them, of text alone."""
    return algorithm in ("sft", "dpo") and not any(form.get(key) for key in _OTHER_MEDIA)


def as_messages(
    rows: Sequence[Mapping[str, Any]], form: Mapping[str, Any], *, algorithm: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows as messages, and `format` as it describes them.

    Args:
        rows: The dataset.
        form: `format` as it was given.
        algorithm: `sft` or `dpo`.

    Raises:
        ConfigError: `format` has values that describe no columns.
        DatasetError: A row cannot be read, or asks for what Trinity-RFT has not; names the row.
    """
    columns = _columns(form)
    written = []
    for number, row in enumerate(rows):
        try:
            written.append(
                _conversation(row, columns) if algorithm == "sft" else _pair(row, columns)
            )
        except DatasetError as error:
            raise DatasetError(f"train_dataset: row {number}: {error}") from None
    names = {
        "prompt_type": "messages",
        "messages_key": "messages",
        "tools_key": "tools",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "enable_concatenated_multi_turn": columns.enable_concatenated_multi_turn,
    }
    kept = {name: value for name, value in form.items() if name not in FormatSection.model_fields}
    return written, {**kept, **names}


def _columns(form: Mapping[str, Any]) -> FormatSection:
    known = {name: form[name] for name in FormatSection.model_fields if name in form}
    if isinstance(kind := known.get("prompt_type"), str):
        known["prompt_type"] = kind.lower()  # Trinity-RFT takes it either way
    try:
        return FormatSection.model_validate(known)
    except ValidationError as error:
        problems = describe(error, FormatSection, list(FormatSection.model_fields))
        raise ConfigError("; ".join(f"{SETTING}.{one.text}" for one in problems)) from None


def _conversation(row: Mapping[str, Any], columns: FormatSection) -> dict[str, Any]:
    found = conversation(row, columns)
    answers = [at for at, message in enumerate(found.messages) if message["role"] == "assistant"]
    wanted = answers if columns.enable_concatenated_multi_turn else [len(found.messages) - 1]
    if list(found.trained) != wanted:
        raise DatasetError(
            "Trinity-RFT trains every answer of a conversation, or the last message alone "
            "(format.enable_concatenated_multi_turn), and knows no weight of a message; leave such "
            "rows out, or set tuner.backend to local"
        )
    return {
        "messages": json.dumps(found.messages, ensure_ascii=False),
        "tools": json.dumps(found.tools, ensure_ascii=False) if found.tools else "",
    }


def _pair(row: Mapping[str, Any], columns: FormatSection) -> dict[str, Any]:
    chosen, rejected = pair(row, columns)
    if chosen.tools:
        raise DatasetError(
            "Trinity-RFT's dpo shows the model no tools; leave them out, or set tuner.backend to "
            "local"
        )
    shared = chosen.messages[:-1]
    for one in (chosen, rejected):
        if one.messages[:-1] != shared or one.trained != (len(shared),):
            raise DatasetError(
                "Trinity-RFT trains whatever follows the shared messages: an end must be one "
                "assistant message of weight 1; leave such rows out, or set tuner.backend to local"
            )
    return {
        "messages": shared,
        "chosen": chosen.messages[-1:],
        "rejected": rejected.messages[-1:],
    }

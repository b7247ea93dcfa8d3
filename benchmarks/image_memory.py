"""Memory of a step with 64 images of one megapixel, beside what `tuner check` predicts.

A random model in the shape of Qwen3-VL with 75M parameters, in a separate process: 32 tasks, each
with two images, and two rollouts of each task. An image becomes 1,024 tokens. Memory is the most
that was resident without what was resident before the model was loaded; a run of the tiny model
imports what there is before.

    python benchmarks/image_memory.py [--images 64]
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _report import Row, report
from openai import AsyncOpenAI
from real_models import in_a_process, said_by_check, seconds_or_less
from real_sizes import GIB, TINY, Agent, resident
from transformers import GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from tests.kit.models import png, vision_tokenizer
from tuner import WorkflowOutput, tune
from tuner.tools.check import check_run
from tuner.tune import prepare

SIDE, OF_A_TASK = 1024, 2
ALLOWED_ERROR = 0.15
SIZES = {"patch_size": 16, "temporal_patch_size": 2}
TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [12, 10, 10],
    },
}
TOWER = {
    **SIZES,
    "depth": 4,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "spatial_merge_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1],
}
REWARDS = itertools.cycle((0.0, 1.0))


def write_model(folder: Path) -> None:
    tokenizer, ids = vision_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        **SIZES, merge_size=2, size={"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
    ).save_pretrained(folder)
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
        vision_config=TOWER,
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)


async def look(task: dict[str, Any], model: Any) -> WorkflowOutput:
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    content: list[Any] = [{"type": "text", "text": "What differs?"}]
    for number in range(OF_A_TASK):
        image = base64.b64encode(png(SIDE, SIDE, seed=OF_A_TASK * task["number"] + number))
        url = f"data:image/png;base64,{image.decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    messages: list[Any] = [{"role": "user", "content": content}]
    await client.chat.completions.create(model=model.model_name, messages=messages, max_tokens=8)
    return WorkflowOutput(reward=next(REWARDS))


def measured(folder: Path, images: int) -> dict[str, Any]:
    """The most that a step in this process holds, and what `tuner check` says."""
    settings = [
        f"checkpoint_root_dir={folder / 'checkpoints'}",
        "buffer.total_steps=1",
        "algorithm.repeat_times=2",
        "algorithm.kl_loss_fn=none",
        "model.max_model_len=4096",
        "trainer.max_token_len_per_gpu=2200",  # one task
        "tuner.device=cpu",
    ]
    tiny = [f"model.model_path={TINY}", "name=tiny", "buffer.batch_size=1"]
    tune(Agent([]).workflow, train_dataset=[{"question": "Who?"}], overrides=[*settings, *tiny])
    tasks = [{"number": number} for number in range(images // OF_A_TASK)]
    settings += [f"model.model_path={folder / 'model'}", f"buffer.batch_size={len(tasks)}"]
    before = resident()
    tune(look, train_dataset=tasks, overrides=[*settings, "name=run"])
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    run = prepare(look, train_dataset=tasks, overrides=[*settings, "name=new"])
    return {"held": held / GIB, "check": check_run(run).text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        found = measured(arguments.child, arguments.images)
        (arguments.child / "measured.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        command = [sys.executable, "-W", "ignore", __file__, "--child", name]
        in_a_process([*command, "--images", str(arguments.images)])
        found = json.loads((folder / "measured.json").read_text())
    held, expected = found["held"], said_by_check(found["check"])
    case = f"{arguments.images} images of {SIDE} x {SIDE} pixels"
    rows = [
        Row(case, "GiB at the peak", held, "tuner check", expected, more_is_better=False),
        seconds_or_less(
            case, "error of the prediction", abs(held - expected) / held, ALLOWED_ERROR
        ),
    ]
    report("image_memory", rows, ["torch", "transformers"])


if __name__ == "__main__":
    main()

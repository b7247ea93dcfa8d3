"""Train an agent that searches before it answers: AReaL's notebook as a script.

    python examples/search_agent/main.py [--config FILE] [key=value ...]

The loop is in the open and asynchronous: while a batch is trained the next one is sampled, by
weights that are at most `rollout.max_head_offpolicyness` updates old.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval import BM25Index, read_corpus, serving

from tuner import TunerError
from tuner.areal import GRPOConfig, load_expr_config, setting

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class SearchAgentConfig(GRPOConfig):
    """AReaL's settings, and those of this example."""

    steps: int = setting(24, "updates of the weights")
    max_turns: int = setting(4, "calls of the model for one question")
    max_tokens: int = setting(512, "tokens of a whole trajectory")
    group_size: int = setting(8, "trajectories of a question")
    corpus: str = setting("", "documents to search in")
    eval_dataset: str = setting("", "questions that are only asked")


@dataclass(frozen=True)
class Result:
    """Mean F1 on the held-out questions, greedily, before and after."""

    before: float
    after: float


def train(config: SearchAgentConfig, run_dir: Path) -> Result:
    """Run the loop; metrics of each step go to `metrics.jsonl` in the run's folder."""
    # They import PyTorch: only once the configuration is in order.
    from agent import SearchAgentWorkflow

    from tuner.areal import FinetuneSpec, PPOActor, RolloutEngine, StatefulDataLoader

    train_rows = _rows(config.train_dataset.path)
    eval_rows = _rows(config.eval_dataset)
    dataloader = StatefulDataLoader(
        train_rows, batch_size=config.train_dataset.batch_size, shuffle=True, seed=config.seed
    )
    actor = PPOActor(config.actor)
    rollout = RolloutEngine(config.rollout)
    size = config.train_dataset.batch_size
    actor.initialize(None, FinetuneSpec(1, config.steps * size, size))
    rollout.initialize()
    with (
        serving(BM25Index(read_corpus(Path(config.corpus)))) as retrieval,
        (run_dir / "metrics.jsonl").open("w") as log,
    ):
        workflow = SearchAgentWorkflow(
            config.gconfig,
            rollout.tokenizer,
            retrieval,
            max_turns=config.max_turns,
            max_tokens=config.max_tokens,
        )
        greedy = SearchAgentWorkflow(
            config.gconfig.new(greedy=True),
            rollout.tokenizer,
            retrieval,
            max_turns=config.max_turns,
            max_tokens=config.max_tokens,
        )

        def held_out() -> float:
            return float(rollout.rollout_batch(eval_rows, greedy)["rewards"].mean())

        before = held_out()
        print(f"held-out F1 before: {before:.3f}", flush=True)
        started = time.perf_counter()
        for step in range(1, config.steps + 1):
            batch = rollout.prepare_batch(dataloader, workflow, group_size=config.group_size)
            reward = float(batch["rewards"].mean())
            batch["prox_logp"] = actor.compute_logp(batch)
            actor.compute_advantages(batch)
            metrics = actor.ppo_update(batch)
            actor.step_lr_scheduler()
            actor.update_weights()
            log.write(json.dumps({"step": step, "reward": reward, **metrics}) + "\n")
            log.flush()
            stale = metrics["stale_fraction"]
            left = (time.perf_counter() - started) / step * (config.steps - step)
            print(
                f"step {step}/{config.steps}: F1 {reward:.3f}, "
                f"{stale:.0%} by older weights, {left:.0f} s left",
                flush=True,
            )
        rollout.destroy()
        after = held_out()
        print(f"held-out F1 after: {after:.3f}", flush=True)
    actor.save(str(run_dir / "checkpoint"))
    config.actor.run.close()
    return Result(before, after)


def _rows(path: str) -> list[dict[str, Any]]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _in_repository(path: str) -> str:
    """A path of the repository from wherever this is run; any other as it is."""
    found = ROOT / path
    return str(found) if path and found.exists() else path


def configured(argv: Sequence[str]) -> tuple[SearchAgentConfig, Path]:
    """The configuration, and the folder of the run."""
    if "--config" not in argv:
        argv = ["--config", str(Path(__file__).with_name("config.yaml")), *argv]
    config, written = load_expr_config(argv, SearchAgentConfig)
    config.actor.path = _in_repository(config.actor.path)
    config.train_dataset.path = _in_repository(config.train_dataset.path)
    config.eval_dataset = _in_repository(config.eval_dataset)
    config.corpus = _in_repository(config.corpus)
    return config, Path(written).parent


if __name__ == "__main__":
    try:
        train(*configured(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")

"""A workflow, rows and a step that tests of the loop in the open share."""

import asyncio

from tests.areal.test_tokens import PROMPT, single
from tuner import tune
from tuner.areal import GenerationHyperparameters, ModelRequest, concat_padded_tensors

GCONFIG = GenerationHyperparameters(max_new_tokens=5)
ROWS = [{"question": str(i), "answer": ["a"], "n": i} for i in range(8)]


class Random:
    """One answer, rewarded by its first token; `group` of them in one dict."""

    def __init__(self, group=1, gconfig=GCONFIG):
        self.group = group
        self.gconfig = gconfig
        self.seen = []

    async def arun_episode(self, engine, data):
        self.seen.append(data["n"])
        responses = await asyncio.gather(
            *[engine.agenerate(ModelRequest(PROMPT, self.gconfig)) for _ in range(self.group)]
        )
        return concat_padded_tensors([single(r, r.output_tokens[0] % 5) for r in responses])


def tuned(workflow, model, root, *more, rows=ROWS):
    """One step under `tune()`: two rollouts of two rows."""
    settings = (
        f"checkpoint_root_dir={root}",
        f"model.model_path={model}",
        "algorithm.repeat_times=2",
        "buffer.batch_size=2",
        "buffer.total_steps=1",
    )
    return tune(workflow, train_dataset=rows, overrides=[*settings, *more])


def step(actor, batch):
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    actor.step_lr_scheduler()
    actor.update_weights()
    return metrics


class Turns:
    """One, two or three answers, each a trajectory with a reward of its own; the second turn
    follows the first without an observation in between."""

    def __init__(self):
        self.count = 0

    async def arun_episode(self, engine, data):
        self.count += 1
        ids, found = list(PROMPT), []
        for turn in range(1 + self.count % 3):
            response = await engine.agenerate(ModelRequest(ids, GCONFIG))
            found.append(single(response, response.output_tokens[0] % 5))
            ids = ids + response.output_tokens + [50] * turn
        return concat_padded_tensors(found)

"""A server that learns, which kills itself in its second update, at the moment it is told."""

import asyncio

from tests.kit.runs import killing_itself
from tests.serving.learning_parts import Server, config
from tuner.runs import directory as run_directory
from tuner.serving.learning.ledger import Ledger
from tuner.serving.serving_store import ServingStore
from tuner.training.trainer import PolicyTrainer


def main(model, root, moment):
    asyncio.run(learn(model, root, moment))


async def learn(model, root, moment):
    async with Server(config(model, root)) as server:
        for number in range(4):
            await server.talk(f"question {number}", reward=number % 2)
        await server.learner.turn()
        if moment == "update":
            PolicyTrainer.step_lr_scheduler = killing_itself(PolicyTrainer.step_lr_scheduler, 1)
        elif moment == "rename":  # of version.json, learned.json, the manifest, then the folder
            run_directory.os.replace = killing_itself(run_directory.os.replace, 4)
        elif moment == "mark":
            ServingStore.mark_trained = killing_itself(ServingStore.mark_trained, 1)
        elif moment == "decide":
            Ledger.add = killing_itself(Ledger.add, 1)
        await server.learner.turn()

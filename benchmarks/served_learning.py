"""Accuracy and sessions of a server that learns from its users' ratings.

It begins with the tiny model as it comes; the goal is nine of ten held-out problems.

`tuner serve --train` is started once for each seed and never again. Simulated users ask it the
problems of examples/gsm8k, each once and on their own (no groups), at the temperature 1. What they
say of an answer comes late and is not always true: a thumb for one session is given when some
dozens of later sessions have ended (geometric, mean 32), one in twenty says the contrary, and one
in ten never comes. A candidate serves only when the 200 held-out problems prove that it is better
than what serves (effect 0.05, level 0.05).

    python benchmarks/served_learning.py [--seeds 3] [--sessions 8000] [--goal 0.9]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from _report import Row, report

ROOT = Path(__file__).parents[1]
GSM8K = ROOT / "examples/gsm8k"
KEY = "admin"
AT_ONCE = 32
"""Users at the same time."""
AFTER = 300
"""Sessions that go on when the goal is reached."""
THINK = 3.0
"""Seconds between two sessions of a user, in the mean."""
DELAY, LIES, SILENT = 32, 0.05, 0.1
BEGIN, GOAL = 0.46, 0.9

AGENT = '''
"""What a user's question goes through, here for the held-out problems."""
from tuner import JudgeOutput, WorkflowOutput
from tuner.rewards import final_answer, math_equal

SYSTEM = "You are a helpful math problem solving agent."


async def run(task, model):
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    answer = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=answer.choices[0].message.content or "")


async def judge(task, response):
    return JudgeOutput(reward=math_equal(final_answer(response), final_answer(task["answer"])))
'''
SYSTEM = "You are a helpful math problem solving agent."


def settings(folder: Path, seed: int) -> dict[str, Any]:
    """The one file."""
    return {
        "project": "served",
        "name": "learning",
        "checkpoint_root_dir": str(folder),
        "model": {
            "model_path": str(ROOT / "models/tiny_math"),
            "max_model_len": 512,
            "max_response_tokens": 96,
        },
        "algorithm": {"optimizer": {"lr": 7e-4}, "kl_loss_fn_args": {"kl_coef": 0.001}},
        "buffer": {
            "batch_size": 128,
            "explorer_input": {
                "eval_tasksets": [{"name": "test", "path": str(GSM8K / "data"), "split": "test"}]
            },
        },
        "explorer": {"runner_per_model": 64},
        "trainer": {"max_token_len_per_gpu": 2048, "max_checkpoints_to_keep": 2},
        "monitor": {"monitor_type": []},
        "tuner": {
            "workflow": str(folder / "agent.py") + ":run",
            "judge": str(folder / "agent.py") + ":judge",
            "seed": seed,
            "serving": {"promotion": {"by": "held_out"}, "log": False},
        },
    }


@contextmanager
def served(folder: Path, seed: int) -> Iterator[str]:
    """The server's address."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(folder, seed)))
    log = (folder / "log").open("wb")
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tuner", "serve", str(folder / "config.yaml"), "--train",
            "--port", str(port),
        ],
        env={**os.environ, "TUNER_ADMIN_KEY": KEY},
        stdout=log,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            try:
                if httpx.get(f"{address}/healthz", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Users:
    """Everybody who asks.

    Attributes:
        sessions: How many have ended.
        right: Of these, whether the answer was right, in order.
    """

    http: httpx.AsyncClient
    seed: int
    sessions: int = 0
    right: list[bool] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        lines = (GSM8K / "data/train.jsonl").read_text().splitlines()
        self.problems = [json.loads(line) for line in lines]
        self.late: list[tuple[int, str, float]] = []

    async def post(self, path: str, body: dict[str, Any], key: str = KEY) -> Any:
        answer = await self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        if answer.status_code >= 400:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    async def ask(self) -> None:
        """One session after the other, and the thumbs that are due."""
        from tuner.rewards import final_answer, math_equal

        while not self.over:
            problem = self.rng.choice(self.problems)
            session = await self.post("/tuner/v1/sessions", {"task": problem})
            said = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": problem["question"]},
            ]
            body = {"model": str(ROOT / "models/tiny_math"), "messages": said}
            answer = await self.post("/v1/chat/completions", body, session["key"])
            text = answer["choices"][0]["message"]["content"] or ""
            await self.post(f"/tuner/v1/sessions/{session['id']}/end", {})
            right = bool(math_equal(final_answer(text), final_answer(problem["answer"])))
            self.sessions += 1
            self.right.append(right)
            if self.rng.random() >= SILENT:
                thumb = right != (self.rng.random() < LIES)
                delay = int(self.rng.expovariate(1 / DELAY))
                self.late.append((self.sessions + delay, session["id"], float(thumb)))
            await self.judge()
            await asyncio.sleep(self.rng.expovariate(1 / THINK))

    async def judge(self) -> None:
        due = [one for one in self.late if one[0] <= self.sessions]
        self.late = [one for one in self.late if one[0] > self.sessions]
        for _, id_, reward in due:
            await self.post(f"/tuner/v1/sessions/{id_}/reward", {"reward": reward})


@dataclass(frozen=True)
class Learned:
    """What became of one server.

    Attributes:
        before, after: Held-out accuracy of what served at first, and of what serves at last.
        promotions, updates, sessions: How many there were until then.
        asked, answered: Share of right answers that users got at first, and from what serves at
            last, sampled.
        sampled, trained, dropped: Tokens of the updates.
    """

    seed: int
    before: float
    after: float
    promotions: int
    updates: int
    sessions: int
    asked: float
    answered: float
    sampled: int
    trained: int
    dropped: int
    seconds: float


async def learn(address: str, folder: Path, arguments: argparse.Namespace, seed: int) -> Learned:
    """Let the users ask until what serves has reached the goal."""
    started, before = time.monotonic(), 0.0
    limits = httpx.Limits(max_connections=AT_ONCE + 8)
    async with httpx.AsyncClient(
        base_url=address, timeout=120, limits=limits, trust_env=False
    ) as http:
        users = Users(http, seed)
        asking = [asyncio.ensure_future(users.ask()) for _ in range(AT_ONCE)]
        try:
            while users.sessions < arguments.sessions:
                await asyncio.sleep(2)
                for one in asking:
                    if one.done():
                        one.result()
                models = (
                    await http.get("/tuner/v1/models", headers={"Authorization": f"Bearer {KEY}"})
                ).json()
                accuracy = held_out(folder)
                before = before or accuracy.get(0, 0.0)
                serving = models["serving"]["version"]
                recent = users.right[-200:]
                right = sum(recent) / max(1, len(recent))
                print(
                    f"seed {seed}: {users.sessions} sessions, {right:.2f} right, "
                    f"version {serving} serves, held out {accuracy.get(serving)}",
                    file=sys.stderr,
                )
                if accuracy.get(serving, 0.0) >= arguments.goal:
                    break
            needed = users.sessions
            while users.sessions < needed + AFTER:  # noqa: ASYNC110  # what users have of it
                await asyncio.sleep(0.5)
        finally:
            users.over = True
            await asyncio.gather(*asking, return_exceptions=True)
    rows = metrics(folder)
    history = [one["decision"] for one in models["history"]]
    return Learned(
        seed=seed,
        before=before,
        after=accuracy[serving],
        promotions=history.count("promote"),
        updates=len(rows),
        sessions=needed,
        asked=sum(users.right[:AFTER]) / AFTER,
        answered=sum(users.right[-AFTER + AT_ONCE :]) / (AFTER - AT_ONCE),
        sampled=int(sum(row["tokens/sampled"] for row in rows)),
        trained=int(sum(row["tokens/trained"] for row in rows)),
        dropped=int(
            sum(v for row in rows for k, v in row.items() if k.startswith("tokens/dropped/"))
        ),
        seconds=time.monotonic() - started,
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "served/learning/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def held_out(folder: Path) -> dict[int, float]:
    """Accuracy on the held-out problems by version, of the recorded rollouts themselves."""
    from tuner.traces import read_traces

    found = {}
    for path in (folder / "served/learning/traces").glob("test_step_*.jsonl"):
        rewards = [trace.reward for trace in read_traces(path) if trace.reward is not None]
        if len(rewards) == 200:
            found[int(path.stem.rpartition("_")[2])] = sum(rewards) / len(rewards)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=8000, help="at most, of one server")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with it
    rows = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with served(folder, seed) as address:
                found = asyncio.run(learn(address, folder, arguments, seed))
        if found.sampled != found.trained + found.dropped:
            raise SystemExit(f"tokens do not add up: {found}")
        case = f"seed {seed}: {found.promotions} promotions in {found.updates} updates"
        rows += [
            Row(case, "held-out accuracy", found.after, "the goal", arguments.goal, 1.0),
            Row(case, "held-out accuracy", found.after, "at first", found.before),
            Row(case, "right answers to users", found.answered, "at first", found.asked),
            Row(case, "sessions until then", found.sessions),
            Row(case, "share of sampled tokens trained", found.trained / found.sampled),
            Row(case, "seconds", found.seconds),
        ]
    report("served_learning", rows)


if __name__ == "__main__":
    main()

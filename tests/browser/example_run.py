"""A run made by hand, with everything that the page shows: tools, branches, failures, curves.

Its texts are cut into tokens by the tokenizer of `models/tiny_math`, so that tokens spell them.
"""

import json
import random
from functools import cache
from pathlib import Path

from tuner.engines import SamplingParams
from tuner.traces import Call, Outcome, RolloutId, Trace, TraceStore

TINY = Path(__file__).parents[2] / "models/tiny_math"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Finds a price."}}
SYSTEM = {"role": "system", "content": "You are a careful agent. Use the tools to compute."}
HOSTILE = '</script><script>window.pwned = 1</script><img src="x" onerror="window.pwned = 2">'


@cache
def _tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def ids(text):
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def said(message):
    """An assistant's message as the model writes it, and as the template prints it."""
    text = message.get("content") or ""
    for tool in message.get("tool_calls", ()):
        text += f"<tool_call>{json.dumps(tool['function'])}</tool_call>"
    return f"{text}<|im_end|>"


def rendered(messages, tools):
    text = "".join(f"Tools: {json.dumps(tool['function'])}\n" for tool in tools)
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{said(message)}\n"
    return text + "<|im_start|>assistant\n"


class Conversation:
    """Makes a trace call by call; continuation keeps the ids that were sampled."""

    def __init__(self, dice):
        self.dice = dice
        self.calls = []

    def ask(self, messages, answer, *, tools=(ADD,), after=None, **fields):
        """One call; `after` is the call whose ids the prompt goes on from."""
        if after is None:
            prompt = ids(rendered(messages, tools))
        else:
            old = self.calls[after]
            new = messages[len(old.messages) + 1 :]
            prompt = old.prompt_ids + old.completion_ids
            prompt += ids(f"\n{rendered(new, ())}")
        completion = ids(said(answer))
        sure = [self.dice.random() < 0.7 for _ in completion]
        self.calls.append(
            Call(
                id=f"call-{len(self.calls)}",
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=tuple(-self.dice.expovariate(20 if known else 0.8) for known in sure),
                versions=(3,) * len(completion),
                sampling=SamplingParams(max_tokens=256, seed=self.dice.getrandbits(62)),
                finish_reason="tool_calls" if "tool_calls" in answer else "stop",
                messages=list(messages),
                tools=list(tools),
                response=answer,
                started=1_763_000_000.0 + 1.5 * len(self.calls),
                seconds=0.8,
                **fields,
            )
        )
        return [*messages, answer]


def uses(name, arguments, id, content=""):
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


def agent(dice, kind, a, b):
    """The calls of one rollout.

    `plain` is one path; `reasoning` loses the reasoning of its first answer, `sub_agent` asks
    another agent, `tools_changed` gets a tool more, `whitespace` strips its first answer, and its
    tool fails.
    """
    talk = Conversation(dice)
    thought = f"<think>{a} and {b} must be added.</think>"
    question = {"role": "user", "content": f"Mia has {a} marbles and finds {b} more. How many?"}
    first = uses("add", {"a": a, "b": b}, "c1", thought if kind == "reasoning" else " Let me add. ")
    history = talk.ask([SYSTEM, question], first, role="solver")
    if kind == "sub_agent":
        checker = {"role": "system", "content": "You check sums."}
        sum_ = {"role": "user", "content": f"Is {a} + {b} = {a + b}?"}
        talk.ask(
            [checker, sum_], {"role": "assistant", "content": "Yes."}, tools=(), role="checker"
        )
    if kind == "reasoning":
        history = [SYSTEM, question, {**first, "content": ""}]
    if kind == "whitespace":
        history = [SYSTEM, question, {**first, "content": "Let me add."}]
    failed = kind == "whitespace"
    history = [*history, result("c1", "Error: add is busy" if failed else str(a + b))]
    answer = {"role": "assistant", "content": f"Mia has {a + b} marbles."}
    tools = (ADD, LOOK_UP) if kind == "tools_changed" else (ADD,)
    goes_on = kind in ("plain", "sub_agent")
    talk.ask(history, answer, tools=tools, after=0 if goes_on else None, role="solver")
    return tuple(talk.calls)


KINDS = ["plain", "plain", "plain", "reasoning", "reasoning", "sub_agent", "tools_changed"]
KINDS += ["whitespace"]


def example_trace(step, task, rollout, kind=None, *, seed=0, **fields):
    dice = random.Random(f"{seed} {step} {task} {rollout}")
    kind = kind or KINDS[(4 * task + rollout) % len(KINDS)]
    a, b = 2 + task, 3 + step % 5
    correct = dice.random() < 0.3 + step / 20
    defaults = {
        "outcome": Outcome.COMPLETED,
        "reward": float(correct),
        "metrics": {"turns": 2.0},
        "response": f"Mia has {a + b} marbles.",
        "seconds": {"workflow": 1.9, "judge": 0.01, "generation": 1.6},
    }
    return Trace(
        id=RolloutId(step, task, rollout),
        task={"question": f"{a} + {b}", "answer": a + b},
        calls=agent(dice, kind, a, b),
        **(defaults | fields),
    )


def metrics(steps):
    dice = random.Random(0)
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward/mean": 0.3 + 0.6 * (1 - 0.85**step) + dice.uniform(-0.04, 0.04),
            "reward/std": 0.45 - step / 60,
            "calls/completion_tokens": 20 + 3 * dice.random(),
            "calls/truncated": 0.3 / step,
            "calls/malformed_tool_calls": max(0, 5 - step),
            "time/generation": 5.0 + dice.random(),
            "time/agent": 0.6,
            "time/judge": 0.1,
            "time/training": 4.0,
            "time/sync": 0.2,
            "tokens/sampled": 1000,
            "tokens/trained": 960,
            "tokens/dropped/timeout": 40,
            "rollouts/completed": 15,
            "rollouts/timeout": 1,
            "tokens_per_second": 100 + step,
            "train/entropy": 1 / step,
            "train/kl_loss": 0.001 * step,
            "train/grad_norm": 0.4 + dice.random() / 10,
            "train/loss": -0.1 / step,
        }
        if step % 4 == 0:
            row["eval/test/reward"] = 0.3 + 0.6 * (1 - 0.85**step)
            row["time/evaluation"] = 3.0
        row["time/step"] = sum(value for name, value in row.items() if name.startswith("time/"))
        rows.append(row)
    return rows


def write_example(path, *, steps=12, tasks=4, rollouts=4, completed=False):
    """A run directory with `steps * tasks * rollouts` traces."""
    store = TraceStore(path / "traces")
    for step in range(1, steps + 1):
        for task in range(tasks):
            for rollout in range(rollouts):
                failed = task == tasks - 1 and rollout == rollouts - 1
                ending = {"outcome": Outcome.TIMEOUT, "reward": None, "error": "60 s were over"}
                store.append(example_trace(step, task, rollout, **(ending if failed else {})))
    rows = "".join(json.dumps(row) + "\n" for row in metrics(steps))
    (path / "metrics.jsonl").write_text(rows)
    if completed:
        (path / "result.json").write_text(json.dumps({"steps": steps}))
    (path / "config.yaml").write_text(
        f"project: AgentScope\nbuffer: {{total_steps: 20}}\nmodel: {{model_path: {TINY}}}\n"
        "algorithm: {algorithm_type: multi_step_grpo, repeat_times: 4}\n"
    )
    return path

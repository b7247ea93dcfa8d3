"""An agent in production: a session, a call with the session's key, and its reward later.

    export TUNER_ADMIN_KEY=$(openssl rand -hex 24)
    tuner serve examples/serving/config.yaml &
    python examples/serving/agent.py

`agent.sh` does the same with curl, and `agent.mts` with `fetch`.
"""

from __future__ import annotations

import os

import tuner

TASK = {"question": "Tom has 5 pens. He buys 3 more pens. How many pens does Tom have now?"}
ANSWER = "8"
SYSTEM = "You are a helpful math problem solving agent."


def served(client: tuner.Client) -> tuple[str, str]:
    """The agent: it needs an address and a key, as of any OpenAI-compatible API.

    Returns:
        The session's id, by which its reward finds it, and the answer.
    """
    session = client.open(task=TASK, tags=["example"], sampling={"temperature": 0})
    reply = session.openai().chat.completions.create(
        model="tiny_math",
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": TASK["question"]},
        ],
    )
    session.end()
    return session.id, reply.choices[0].message.content or ""


def judged(client: tuner.Client, session_id: str, answer: str) -> float:
    """What came of it, days later, in another process: the reward goes to the session's id."""
    reward = float(ANSWER in answer.split("####")[-1])
    told = client.session(session_id).reward(reward, feedback="compared with the known answer")
    assert told.reward == reward
    return reward


def main() -> None:
    url = os.environ.get("TUNER_URL", "http://127.0.0.1:8700")
    with tuner.Client(url, key=os.environ["TUNER_ADMIN_KEY"]) as client:
        session_id, answer = served(client)
        print(session_id, judged(client, session_id, answer))


if __name__ == "__main__":
    main()

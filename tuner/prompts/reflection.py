"""The model that proposes prompts: each of its answers is on disk before it is used."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import openai

from tuner.errors import TrainingError, TunerError
from tuner.prompts.trials import Spent
from tuner.traces import Usage
from tuner.traces.store import complete_lines, cut_torn_line


class Reflection:
    """Asks a model, and gives answers that are on disk again in place of asking.

    Equal questions are separate samples: the k-th is answered by the k-th answer.

        {"asked": sha256, "prompt": "...", "answer": "...", "usage": [900, 120]}

    Args:
        client: Who is asked.
        model_name: Its name there.
        path: The file of what was said before.
        prices: Of its tokens.
        spent: Where they are counted.

    Raises:
        TunerError: A line of the file is not of this form.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model_name: str,
        path: Path,
        *,
        prices: tuple[float, float],
        spent: Callable[[], Spent],
    ) -> None:
        self._client, self._model_name = client, model_name
        self._path, self._prices, self._spent = path, prices, spent
        self._known: defaultdict[str, deque[tuple[str, Usage]]] = defaultdict(deque)
        for number, line in complete_lines(path):
            try:
                row = json.loads(line)
                self._known[row["asked"]].append((str(row["answer"]), Usage(*row["usage"])))
            except (ValueError, LookupError, TypeError) as error:
                raise TunerError(
                    f"{path}, line {number} is no reflection: {error!r}; delete the line, and it "
                    "is asked for again"
                ) from error

    async def ask(self, prompt: str) -> str:
        """The answer to a prompt, as one message of the user.

        Raises:
            TrainingError: There is none.
        """
        asked = hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()
        if self._known[asked]:
            answer, usage = self._known[asked].popleft()
        else:
            answer, usage = await self._asked(prompt)
            row = {"asked": asked, "prompt": prompt, "answer": answer}
            used = [usage.input_tokens, usage.output_tokens]
            cut_torn_line(self._path)
            with self._path.open("ab") as file:
                file.write(json.dumps({**row, "usage": used}).encode() + b"\n")
        spent = self._spent()
        spent.reflections += 1
        spent.add(usage, self._prices)
        return answer

    async def _asked(self, prompt: str) -> tuple[str, Usage]:
        who = f"the reflecting model {self._model_name!r} at {self._client.base_url}"
        try:
            answer = await self._client.chat.completions.create(
                model=self._model_name, messages=[{"role": "user", "content": prompt}]
            )
        except openai.OpenAIError as error:
            raise TrainingError(
                f"{who} gave no answer: {type(error).__name__}: {error}; the search goes on from "
                "here when it is started again"
            ) from error
        text = answer.choices[0].message.content if answer.choices else None
        if not text or not text.strip():
            raise TrainingError(f"{who} answered without a text: name another one")
        said = answer.usage
        return text, Usage(said.prompt_tokens, said.completion_tokens) if said else Usage()

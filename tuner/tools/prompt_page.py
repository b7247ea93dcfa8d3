"""Write `prompts.html` of a search: the tree of candidates, their scores by task, and rollouts.

One HTML file without scripts or external requests. The template escapes tasks, prompts and model
output.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from tuner.runs.directory import RunDirectory, write_atomically
from tuner.runs.estimates import estimate, paired
from tuner.tasks.datasets import row_text
from tuner.tools.candidates import SEARCH
from tuner.tools.prompt_optimizers import TREES
from tuner.traces import RolloutId
from tuner.traces.reading import AnyNumber, Integer, JsonReader, Text
from tuner.traces.store import closed, read_traces

logger = logging.getLogger("tuner")

NAME = "prompts.html"
ASSETS = Path(__file__).with_name("assets")
PROMPT_CHARACTERS = 20_000
"""Maximum length of a prompt; a longer one is cut and marked."""
SAID_CHARACTERS = 500
"""Maximum length of a task, a response or feedback."""
ROLLOUT_CHARACTERS = 1_500_000
"""Maximum of all rollouts shown together; further tasks are omitted and counted."""
OVERHEAD = 120
"""Characters of markup for each rollout."""
WORDS = 2_000
"""Texts of more words are compared line by line."""
SHADES = 8


PROMPT_RESULTS = JsonReader[dict[str, Any]](
    closed(
        "PromptResult",
        {"prompts": dict[Text, Text], "metrics": dict[Text, Integer | AnyNumber]},
    ),
    "the result of a search",
)
"""`result.json` of a search."""


def _with_first(search: dict[str, Any]) -> dict[str, Any]:
    first = search.get("first")
    if not isinstance(first, dict) or not all(isinstance(text, str) for text in first.values()):
        raise ValueError("first: the prompts at the start of the search are wanted")
    return search


_SEARCHES = JsonReader[dict[str, Any]](
    Annotated[dict[Text, Any], AfterValidator(_with_first)], "the settings of a search"
)


@dataclass(frozen=True)
class ShownRollout:
    """A rollout as the page shows it; `said` is the judge's feedback, or the error."""

    id: RolloutId
    reward: float | None
    outcome: str
    task: str
    response: str
    said: str

    @property
    def characters(self) -> int:
        return len(self.response) + len(self.said) + OVERHEAD


@dataclass
class ComparedPrompt:
    """A compared candidate; its number is the step of its traces.

    `changed` has the texts that differ from its parent's, by component, as a difference and whole;
    `best_on` counts tasks on which no candidate is better, `alone_on` those on which none is equal.
    """

    number: int
    mean: float
    interval: str
    gain: float | None
    changed: dict[str, tuple[list[tuple[str, str]], str]]
    best_on: int = 0
    alone_on: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    children: list[ComparedPrompt] = field(default_factory=list)


def write_page(run: Path, *, stopped: str | None = None) -> Path:
    """Write `prompts.html` into the directory of a search; `stopped` says why it ended early."""
    path = run / NAME
    write_atomically(path, page(run, stopped))
    return path


def leave_page(directory: RunDirectory, stopped: str | None) -> Path | None:
    """Call `write_page()` after the search has ended; an error is only logged."""
    try:
        return write_page(directory.path, stopped=stopped)
    except Exception as error:
        logger.warning(
            "%s was not written: %s: %s; `tuner view %s --report` tries again",
            NAME,
            type(error).__name__,
            error,
            directory.path,
        )
        return None


def is_search(run: Path) -> bool:
    """True for the directory of a prompt search."""
    return (run / "search.json").is_file()


def page(run: Path, stopped: str | None = None) -> str:
    """The page; see `write_page()`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    remedy = "delete it: it is written anew when the search is started again"
    search = _SEARCHES.document(run / "search.json", remedy)
    nothing: dict[str, Any] = {"compare_on": [], "candidates": [], "rejected": []}
    tree = _read(TREES, run / "tree.json", remedy) or nothing
    result = _read(PROMPT_RESULTS, run / "result.json", remedy)
    tried = list(_tried(run / "traces"))
    spent = {"rollouts": len(tried)} | (result["metrics"] if result else tree)
    nodes = _nodes(tree, tried)
    best = max(nodes, key=lambda node: node.mean, default=None)
    tasks, left_out = _shown(tried)
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(NAME).render(
        nonce=secrets.token_urlsafe(16),
        name=run.resolve().name,
        status="completed" if result else "stopped" if stopped else "no result yet",
        stopped=stopped,
        settings={k: _setting(v) for k, v in search.items() if v is not None and k != "first"},
        spent=spent,
        failures=Counter(one.outcome for one in tried if one.reward is None),
        nodes=nodes,
        ordered=_ordered(nodes[:1]),
        best=best,
        texts={} if best is None else _since_the_first(search["first"], tree, best.number),
        rejected=len(tree["rejected"]),
        curve=_curve(tree["candidates"]),
        columns=[one["number"] for one in tree["candidates"]],
        heat=_heat(tree, tried),
        texts_of={one.id.task: one.task for one in tried if one.id.split == SEARCH},
        held_out=_held_out(tried, best),
        tasks=tasks,
        left_out=left_out,
        of_tasks=len(tasks) + left_out,
        SEARCH=SEARCH,
    )


def _read(reader: JsonReader[dict[str, Any]], path: Path, remedy: str) -> dict[str, Any] | None:
    return reader.document(path, remedy) if os.path.lexists(path) else None


def _setting(value: Any) -> Any:
    """A remote model by its name; the URL is omitted because the page may be shared."""
    return value.get("model_name") if isinstance(value, dict) else value


def _tried(folder: Path) -> Iterator[ShownRollout]:
    """The rollouts of a search, without those that a later attempt replaced."""
    for path in sorted(folder.glob("*.jsonl")):
        for trace in read_traces(path):
            if trace.final:
                said = "\n".join(filter(None, (trace.feedback, trace.error)))
                yield ShownRollout(
                    trace.id,
                    trace.reward,
                    trace.outcome.value,
                    _cut(row_text(trace.task), SAID_CHARACTERS),
                    _cut(trace.response, SAID_CHARACTERS),
                    _cut(said, SAID_CHARACTERS),
                )


def _cut(text: str, limit: int) -> str:
    left = len(text) - limit
    return text if left <= 0 else f"{text[:limit]} [... {left} more characters]"


def _nodes(tree: Mapping[str, Any], tried: Sequence[ShownRollout]) -> list[ComparedPrompt]:
    """The candidates in the order of comparison; the first is the root."""
    nodes: dict[int, ComparedPrompt] = {}
    texts: dict[int, dict[str, str]] = {}
    for one in tree["candidates"]:
        number, parent = one["number"], nodes.get(next(iter(one["parents"]), -1))
        if number in nodes:  # a text that was proposed twice
            continue
        texts[number] = one["prompts"]
        before = {} if parent is None else texts[parent.number]
        found = estimate(list(one["scores"].values()))
        nodes[number] = ComparedPrompt(
            number,
            one["mean"],
            "" if found is None else found.text(),
            None if parent is None else one["mean"] - parent.mean,
            {
                name: (difference(before[name], text) if before else [], _prompt(text))
                for name, text in one["prompts"].items()
                if before.get(name) != text
            },
        )
        if parent is not None:
            parent.children.append(nodes[number])
    for one in tree["rejected"]:
        nodes[one["parents"][0]].rejected.append(one)
    for rollout in tried:
        if rollout.reward is None and rollout.id.step in nodes:
            nodes[rollout.id.step].failed[rollout.outcome] += 1
    for best in _front(tree, _rewarded(tried)).values():
        for number in best:
            nodes[number].best_on += 1
            nodes[number].alone_on += len(best) == 1
    return list(nodes.values())


def _ordered(roots: Sequence[ComparedPrompt]) -> list[tuple[ComparedPrompt, int]]:
    """Each candidate before its children, with the number of child lists that end after it."""
    found, left = [], [(node, 0) for node in roots]
    while left:
        node, ends = left.pop()
        found.append((node, 0 if node.children else ends))
        last_first = node.children[::-1]
        left += [(child, ends + 1 if child is last_first[0] else 0) for child in last_first]
    return found


def _since_the_first(
    first: Mapping[str, str], tree: Mapping[str, Any], number: int
) -> dict[str, list[tuple[str, str]]]:
    prompts = next(one["prompts"] for one in tree["candidates"] if one["number"] == number)
    return {name: difference(first.get(name, ""), text) for name, text in prompts.items()}


def _prompt(text: str) -> str:
    return _cut(text, PROMPT_CHARACTERS)


def difference(before: str, after: str) -> list[tuple[str, str]]:
    """The change of a text, word by word, or line by line where it is long.

    Pieces are ("same" or "del" or "ins", text); without "del" they are the text after.
    """
    before, after = _prompt(before), _prompt(after)
    old, new = (re.findall(r"\s*\S+|\s+$", text) for text in (before, after))
    if max(len(old), len(new)) > WORDS:
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    pieces = []
    matcher = difflib.SequenceMatcher(None, old, new)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(new[k:m])))
            continue
        pieces += [("del", "".join(old[i:j])), ("ins", "".join(new[k:m]))]
    return [(kind, text) for kind, text in pieces if text]


def _rewarded(tried: Sequence[ShownRollout]) -> set[tuple[int, int]]:
    """The (candidate, row) pairs of the search's rollouts that have a reward."""
    return {
        (one.id.step, one.id.task)
        for one in tried
        if one.reward is not None and one.id.split == SEARCH
    }


def _front(tree: Mapping[str, Any], rewarded: Collection[tuple[int, int]]) -> dict[int, set[int]]:
    """The Pareto front: for each compared task, the candidates that no other candidate beats.

    Leaves out candidates whose rollouts on the task all failed.
    """
    scores: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for one in tree["candidates"]:
        for row, score in one["scores"].items():
            if (one["number"], int(row)) in rewarded:
                scores[int(row)][one["number"]] = score
    tops = {row: max(of_row.values()) for row, of_row in scores.items()}
    return {
        row: {number for number, score in of_row.items() if score == tops[row]}
        for row, of_row in scores.items()
    }


def _heat(
    tree: Mapping[str, Any], tried: Sequence[ShownRollout]
) -> list[tuple[int, list[tuple[str, str]]]]:
    """For each compared task its row and each candidate's score with its CSS classes.

    `f`: none of its rollouts has a reward; `b`: none is better; `h0` to `h8`: low to high.
    """
    candidates, rewarded = tree["candidates"], _rewarded(tried)
    front = _front(tree, rewarded)
    every = [score for one in candidates for score in one["scores"].values()]
    low, span = min(every, default=0.0), (max(every, default=0.0) - min(every, default=0.0)) or 1.0

    def cell(one: Mapping[str, Any], row: int) -> tuple[str, str]:
        score = one["scores"].get(str(row))
        if score is None:
            return "", ""
        if (one["number"], row) not in rewarded:
            return "failed", "f"
        shade = f"h{round((score - low) / span * SHADES)}"
        return f"{score:.3g}", f"{shade} b" if one["number"] in front[row] else shade

    return [(row, [cell(one, row) for one in candidates]) for row in tree["compare_on"]]


def _curve(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Mean score over rollouts spent, as a 600 x 150 picture; None for a single candidate."""
    if len(candidates) < 2:
        return None
    means = [float(one["mean"]) for one in candidates]
    low, high = min(means), max(means)
    right = max(one["rollouts"] for one in candidates) or 1
    points = [
        (
            one["number"],
            one["mean"],
            round(600 * one["rollouts"] / right, 1),
            round(150 - 150 * (one["mean"] - low) / ((high - low) or 1.0), 1),
        )
        for one in candidates
    ]
    path, best = f"M{points[0][2]} {points[0][3]}", points[0][3]
    for _, _, x, y in points[1:]:
        best = min(best, y)
        path += f"H{x}V{best}"
    return {"points": points, "path": path, "low": low, "high": high, "rollouts": right}


def _held_out(tried: Sequence[ShownRollout], best: ComparedPrompt | None) -> dict[str, Any]:
    """Scores on rows that the search did not use, and the gain on them."""
    found: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    failed: Counter[tuple[int, int]] = Counter()
    for one in tried:
        if one.id.split != SEARCH:
            times = (one.id.step, one.id.rollout)
            found[times] |= {} if one.reward is None else {one.id.task: one.reward}
            failed[times] += one.reward is None
    means = {times: estimate(list(rewards.values())) for times, rewards in found.items()}
    lines = [
        (times[0], "" if (of := means[times]) is None else of.text(), len(rewards), failed[times])
        for times, rewards in sorted(found.items())
    ]
    before = min(found, default=None)
    after = max((times for times in found if best and times[0] == best.number), default=None)
    if before is None or after is None or before == after:
        return {"lines": lines, "gain": None}
    gain = paired(dict(sorted(found[after].items())), found[before])
    return {"lines": lines, "gain": None if gain is None else gain.text("+.3f")}


def _shown(
    tried: Sequence[ShownRollout],
) -> tuple[list[tuple[str, int, str, list[ShownRollout]]], int]:
    """The tasks to show, and how many are omitted because of the page's size.

    Tasks whose rewards differ most between candidates come first.
    """
    of_task: defaultdict[tuple[str, int], list[ShownRollout]] = defaultdict(list)
    for one in tried:
        of_task[one.id.split, one.id.task].append(one)

    def spread(key: tuple[str, int]) -> float:
        rewards = [one.reward for one in of_task[key] if one.reward is not None]
        return max(rewards, default=0.0) - min(rewards, default=0.0)

    shown, room = [], ROLLOUT_CHARACTERS
    for key in sorted(of_task, key=spread, reverse=True):
        room -= sum(one.characters for one in of_task[key])
        if room >= 0:
            shown.append(key)
    return [
        (*key, of_task[key][0].task, sorted(of_task[key], key=lambda one: one.id))
        for key in sorted(shown, key=lambda key: (key[0] != SEARCH, key))
    ], len(of_task) - len(shown)

"""Writes the tables of both backends into docs/capabilities.md, from the code that checks them.

`python -m tuner.trinity.capabilities`
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner.algorithms.table import ALGORITHMS, NOT_HERE
from tuner.config.document import accepted
from tuner.config.foreign import FOREIGN
from tuner.config.keys import fields, section_of
from tuner.trinity.config import USED, WITHOUT_EFFECT
from tuner.trinity.modes import MODES
from tuner.trinity.refusals import (
    ALGORITHMS_REFUSED,
    ALGORITHMS_WITHOUT_TINKER,
    REFUSALS,
    WITH_TINKER,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "capabilities.md"
BEGIN = "<!-- begin: python -m tuner.trinity.capabilities -->\n"
END = "<!-- end -->\n"


# Keys that this backend sets by itself, whatever the file says.
_OWN_WORKFLOW = "replaced by `TunerWorkflow`, which runs the workflow and the judge"
OURS = {
    "default_workflow_type": _OWN_WORKFLOW,
    "default_eval_workflow_type": _OWN_WORKFLOW,
    "default_reward_fn_type": "no effect",
    "reward_fn_args": "no effect",
}


def table() -> str:
    """The tables, as they stand between the marks of docs/capabilities.md."""
    parts = (*_algorithms(), "", *_settings(), "", *_with_tinker())
    return "\n".join((BEGIN.rstrip(), *parts, END))


def page() -> str:
    """docs/capabilities.md with the tables as they have to be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


def _algorithms() -> Iterator[str]:
    yield "| algorithm | `local` | `trinity` |"
    yield "|---|---|---|"
    for name in sorted({*ALGORITHMS, *NOT_HERE}):
        local = f"no: {NOT_HERE[name]}" if name in NOT_HERE else "yes"
        there = f"no: {ALGORITHMS_REFUSED[name]}" if name in ALGORITHMS_REFUSED else "yes"
        yield f"| `{name}` | {local} | {there} |"


def _settings() -> Iterator[str]:
    """The settings that are not the same on both; the others are read by both."""
    yield "| setting | `local` | `trinity` |"
    yield "|---|---|---|"
    refusals = {row.key: f"{_not(row.values)}: {row.why}" for row in REFUSALS}
    rows = {"mode": ("`both`, `train`", ", ".join(f"`{mode}`" for mode in MODES))}
    for path, info in fields():
        if section_of(info.annotation) is None or info.description:
            rows.setdefault(path, ("yes", refusals.pop(path, _of_ours(path))))
    for row in FOREIGN:
        key = row.path.removesuffix(".**")
        there = OURS.get(row.path.rpartition(".")[2], "yes")
        rows[row.path] = (_local(accepted(row)), refusals.pop(key, there))
    # What is left is a key inside one that the local backend takes no other values of.
    rows |= {key: ("no", why) for key, why in refusals.items()}
    folded: dict[tuple[str, str, str], list[str]] = {}
    for path, (local, there) in rows.items():
        section, _, name = path.removesuffix(".**").rpartition(".")
        if local != there:
            folded.setdefault((section, local, there), []).append(name)
    for (section, local, there), names in folded.items():
        known = ", ".join(f"`{name}`" for name in names)
        cells = (f"`{section}.` {known}" if section else known, local, there)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _with_tinker() -> Iterator[str]:
    """What Tinker's service has not, besides."""
    yield "| with `model.tinker.enable` also refused | |"
    yield "|---|---|"
    for row in WITH_TINKER:
        yield f"| `{row.key}` {row.values} | {row.why} |"
    whys: dict[str, list[str]] = {}
    for name, why in ALGORITHMS_WITHOUT_TINKER.items():
        whys.setdefault(why, []).append(f"`{name}`")
    for why, names in whys.items():
        yield f"| `algorithm.algorithm_type` {', '.join(names)} | {why} |"


def _not(values: str) -> str:
    return "no" if values == "anything" else f"not {values}"


def _local(values: str) -> str:
    return {"anything": "no effect", "nothing": "no"}.get(values, f"only {values}")


def _of_ours(path: str) -> str:
    section, _, rest = path.partition(".")
    if section != "tuner":
        return "yes"
    name = rest.partition(".")[0]
    return "yes" if name in USED else "no effect" if name in WITHOUT_EFFECT else "no"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The pages: links lead somewhere, settings are settings, and the code of the how-tos runs."""

import re
import shutil
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from docs import recordings, tables
from tests.kit import forked, runs
from tests.kit.examples import grid
from tests.pages import (
    LOGS,
    MOST_WORDS,
    PAGES,
    ROOT,
    Block,
    blocks,
    marked_blocks,
    parsed,
)
from tuner.config import load_config
from tuner.loop import run_local
from tuner.tune import leave_report


@cache
def anchors(page: Path) -> set[str]:
    """What a code host makes of headings: lower case, no punctuation, a hyphen for each space."""
    headings = [
        "".join(part.content for part in inline.children or ())
        for opening, inline in pairwise(parsed(page))
        if opening.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for token in parsed(page):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if not target or "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}: there is no such file"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}: {target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_its_diagrams_need_no_network(page):
    tokens = [token for token in parsed(page) if token.type in ("text", "code_inline", "fence")]
    words = sum(len(token.content.split()) for token in tokens)
    assert words <= MOST_WORDS or page.name in LOGS, f"{page}: {words} words; split it"
    assert "mermaid" not in {token.info for token in tokens}, f"{page}: draw it as an SVG"


@pytest.mark.parametrize("folder", ["benchmarks", "config.yaml", "examples", "tests", "tuner"])
def test_pages_that_other_files_name_are_there(folder):
    """Sentences of errors, comments and notebooks say `docs/serving.md` and the like."""
    suffixes = {".html", ".ipynb", ".js", ".py", ".yaml"}
    files = [ROOT / folder, *(ROOT / folder).rglob("*")]
    for file in (file for file in files if file.suffix in suffixes):
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|png)", file.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{file}: {name}"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_generated_pages_are_current(page):
    assert page.read_text(encoding="utf-8") == tables.PAGES[page](), "run: python -m docs.tables"


@pytest.mark.parametrize(
    "page", [*(ROOT / "docs/reference").glob("*.md"), *tables.PAGES], ids=lambda page: page.name
)
def test_generated_pages_say_so(page):
    assert "do not edit" in "".join(page.read_text(encoding="utf-8").splitlines()[:3])


def test_the_recordings_of_the_terminal_have_the_form_of_a_run(
    random_model_path, tmp_path, capsys, caplog
):
    """Labels, not numbers: `python -m docs.recordings` makes them again."""
    for _ in range(2):
        result = run_local(
            runs.config(random_model_path, tmp_path, "buffer.total_steps=2"),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN,
            eval_tasks={"held-out": runs.EVAL},
            report=leave_report,
        )
        print(result)
    printed = "\n".join(
        [capsys.readouterr().out, *(record.getMessage() for record in caplog.records)]
    )
    found = recordings.forms(printed) - recordings.forms(recordings.PAGE.read_text("utf-8"))
    # Of this model: what it leaves out at the end of a turn, and answers that are cut off.
    assert not {one for one in found if not one.startswith("step #: ")}


def test_pictures_of_the_page_have_its_titles():
    """`python -m tests.browser.screenshot` makes them again."""
    files = (ROOT / "tuner/tools/viewer/assets").iterdir()
    assets = "".join(file.read_text("utf-8") for file in files)
    titles = {
        (picture.name, title)
        for picture in (ROOT / "docs").glob("*.png")
        for title in Image.open(picture).text.get("Titles", "").splitlines()
    }
    assert len(titles) > 10
    # A name in parentheses is the run's.
    gone = {one for one in titles if not re.search(rf"[\">`]{one[1].split(' (')[0]}", assets)}
    assert not gone


YAML = [
    (page.name, block.code)
    for page in PAGES
    for block in marked_blocks(page)
    if block.language == "yaml" and block.kind != "no"
]


@pytest.mark.parametrize(("page", "settings"), YAML)
def test_settings_on_a_page_are_accepted(page, settings, tmp_path):
    (tmp_path / "config.yaml").write_text(settings)
    load_config(tmp_path / "config.yaml")


CODE = [
    (page, block)
    for page in PAGES
    for block in marked_blocks(page)
    if block.language == "python" or block.kind.startswith("tests/")
]


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in CODE), ids=lambda p: p.name)
def test_every_block_says_how_it_runs(page):
    for block in (block for where, block in CODE if where == page):
        assert block.kind in ("script", "functions", "beside a run", "no") or (
            block.kind.startswith("tests/") and page.name in (ROOT / block.kind).read_text()
        ), f"{page.name}: <!-- run: {block.mark} --> above a block that begins {block.code[:60]!r}"


def joined(kind: str) -> dict[str, list[Block]]:
    """Blocks that run together, by the page and their name; those without a name by themselves."""
    found: dict[str, list[Block]] = {}
    for page, block in CODE:
        if block.kind == kind:
            names = [word for word in block.words if "=" not in word]
            alone = [str(len(found))] if kind == "script" and not names else names
            found.setdefault(" ".join([page.name, *alone]), []).append(block)
    return found


def text(group: list[Block]) -> str:
    return "\n".join(block.code for block in group)


SCRIPTS = joined("script")
FUNCTIONS = joined("functions")
BESIDE_A_RUN = joined("beside a run")


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_as_they_stand(name, tmp_path):
    script = text(SCRIPTS[name])
    (tmp_path / "main.py").write_text(script)
    (tmp_path / "config.yaml").write_text(SETTINGS)
    (tmp_path / "my_dataset").mkdir()
    for split in ("train", "test"):
        rows = (ROOT / f"examples/gsm8k/data/{split}.jsonl").read_text().splitlines()[:8]
        (tmp_path / f"my_dataset/{split}.jsonl").write_text("\n".join(rows))
    printed = forked.script(tmp_path / "main.py")
    assert "Traceback" not in printed
    assert "tune(" not in script or "step 2/2" in printed


# What the tutorial's `config.yaml` is here: as small as can be.
SETTINGS = f"""
algorithm: {{repeat_times: 4}}
model: {{model_path: {ROOT}/models/tiny_math, max_model_len: 512, max_response_tokens: 32}}
buffer: {{batch_size: 4, total_steps: 2}}
"""


@grid(
    "name, judge",
    [
        (name, judge)
        for name, group in FUNCTIONS.items()
        for judge in dict.fromkeys(
            ["judge", *(w[6:] for b in group for w in b.words if w.startswith("judge="))]
        )
    ],
    quick=1,
)
def test_functions_of_a_page_are_those_of_a_run(name, judge, random_model_path, tmp_path):
    path = tmp_path / "functions.py"
    # What a random model writes is no number, and what compares it takes seconds to import.
    path.write_text(text(FUNCTIONS[name]).replace("timeout=5)", "timeout=100)"))
    spec = spec_from_file_location("functions", path)
    functions = module_from_spec(spec)
    spec.loader.exec_module(functions)
    assert judge == "judge" or hasattr(functions, judge)
    result = run_local(
        runs.config(random_model_path, tmp_path, "buffer.total_steps=1"),
        workflow=getattr(functions, "workflow", runs.workflow),
        judge=getattr(functions, judge, runs.judge),
        train_tasks=[{**task, "answer": "4"} for task in runs.TRAIN],
        eval_tasks={"held-out": [{**task, "answer": "4"} for task in runs.EVAL]},
    )
    assert result.outcomes == {"completed": 6}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's program is curl")
def test_a_program_that_is_not_python_is_trained(tmp_path):
    (program,) = blocks("agents.md", "bash", "tests/test_pages.py")
    (script,) = blocks("agents.md", "python", "tests/test_pages.py")
    (tmp_path / "agent.sh").write_text(program)
    (tmp_path / "main.py").write_text(script)
    printed = forked.script(tmp_path / "main.py")
    assert "step 2/2" in printed
    assert "32 completed" in printed


@pytest.fixture(scope="module")
def beside_a_run(random_model_path, tmp_path_factory) -> Path:
    """A folder with a finished run in `checkpoints/AgentScope/GSM8K-tiny`."""
    folder = tmp_path_factory.mktemp("beside")
    config = runs.config(random_model_path, folder / "checkpoints", "project=AgentScope")
    run_local(
        config.model_copy(update={"name": "GSM8K-tiny"}),
        workflow=runs.workflow,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
    return folder


# What is printed beside that run, as patterns and how often each is found.
PRINTED = {
    "looking.md": {
        r"^reward/mean \[[\d., -]+\]$": 1,
        "'rollouts/completed': 6": 1,
        r"^-?[\d.]+ \['(?:length|stop)": 2,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", BESIDE_A_RUN)
def test_code_that_looks_at_a_run(name, beside_a_run):
    (beside_a_run / "main.py").write_text(text(BESIDE_A_RUN[name]))
    printed = forked.script(beside_a_run / "main.py")
    assert "tune(" not in text(BESIDE_A_RUN[name]) or "step 2/2" in printed
    for pattern, count in PRINTED.get(name, {}).items():
        assert len(re.findall(pattern, printed, re.MULTILINE)) == count, pattern

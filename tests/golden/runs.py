"""What small deterministic runs compute, bit for bit: a tool for redesigns, run by hand.

    OMP_NUM_THREADS=1 python -m tests.golden.runs check tests/golden/runs.json [NAME ...]
    OMP_NUM_THREADS=1 python -m tests.golden.runs write FILE [NAME ...]

Of each run the file has hashes of the weights, the trainer's state, the traces and metrics without
their times, the result, the effective configuration and the names of all files. Weights are equal
bit for bit on one kind of CPU and with one version of PyTorch alone: the file says which, `check`
says where it is run on another, and there a file of its own is written from the code as it was.

Names are those of files in a run's directory, and of recipes: modules may move.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")

import torch

from tests.golden import areal_recipes, recipes
from tests.kit.forked import mend_thread_pool

assert areal_recipes.loop  # it enters its recipes when it is imported

_TIMES = re.compile(r"^(time|rollout_seconds)/|per_second|seconds$|mfu$|memory")
_STAMPED = re.compile(r"\d{10}\.\S+")  # TensorBoard names its files by time and machine


def machine() -> dict[str, str]:
    """What hashes of weights depend on besides the code."""
    import peft
    import transformers

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def hashed(value: Any) -> str:
    """A hash of nested data with tensors in it."""
    digest = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            tensor = node.detach().cpu().contiguous()
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, Mapping):
            for key in sorted(node, key=str):
                digest.update(f"{key!r}:".encode())
                add(node[key])
        elif isinstance(node, list | tuple):
            digest.update(f"[{len(node)}".encode())
            for item in node:
                add(item)
        else:
            digest.update(repr(node).encode())
        digest.update(b";")

    add(value)
    return digest.hexdigest()[:24]


def timeless(node: Any) -> Any:
    """Nested data without what is measured in seconds, or is a moment."""
    if isinstance(node, dict):
        return {
            key: timeless(value)
            for key, value in node.items()
            if key not in ("started", "seconds") and not _TIMES.search(key)
        }
    return [timeless(item) for item in node] if isinstance(node, list) else node


def parts(folder: Path) -> Iterator[tuple[str, str]]:
    """(Name, hash) of everything in a folder that is compared."""
    from safetensors.torch import load_file

    names = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] in ("model", "teacher", "helper"):
            continue  # what the run began with
        if path.name in ("manifest.json", ".lock"):
            continue  # of a checkpoint: what its files are is compared itself
        names.append(_STAMPED.sub("STAMP", name))
        if path.suffix == ".safetensors":
            yield name, hashed(load_file(path))
        elif path.suffix == ".pt":
            yield name, hashed(torch.load(path, weights_only=True))
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            rows = timeless(_placeless(rows, folder))
            if path.parent.name == "traces":  # in the order in which rollouts ended
                rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
            yield name, hashed(rows)
        elif path.name == "result.json":  # recorded when the metrics were in it, too
            lines = path.with_name("metrics.jsonl").read_text("utf-8").splitlines()
            rows = [{key: float(n) for key, n in json.loads(line).items()} for line in lines]
            result = {**json.loads(path.read_text("utf-8")), "history": rows}
            yield name, hashed(timeless(_placeless(result, folder)))
        elif path.name in ("adapter_config.json", "version.json"):
            yield name, hashed(timeless(_placeless(json.loads(path.read_text("utf-8")), folder)))
        elif path.name == "config.yaml":
            yield name, hashed(_placeless(path.read_text("utf-8"), folder))
    yield "files", hashed(names)


def _placeless(node: Any, folder: Path) -> Any:
    text = json.dumps(node)
    for place, name in ((folder, "FOLDER"), (recipes.REPOSITORY, "REPOSITORY")):
        text = text.replace(json.dumps(str(place))[1:-1], name)
    # A configuration names functions by their module.
    return json.loads(text.replace(recipes.__name__, "tests.golden.recipes"))


def import_once(root: Path) -> None:
    """Import here, before the first fork, what every run would import: most of its time."""
    for name in ("agentscope", "anthropic", "openai", "peft", "llguidance", "pebble"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # it has a thread
    recipes.make_model(root / "first")
    if len(threading.enumerate()) > 1:
        raise RuntimeError(f"threads are running, so a fork is not safe: {threading.enumerate()}")


def compute(name: str, folder: Path) -> dict[str, str]:
    """Run a recipe in a process of its own, and hash what it leaves."""
    folder.mkdir(parents=True)
    outcome, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            mend_thread_pool()
            returned = recipes.RECIPES[name](folder)
            found = dict(parts(folder))
            for index, item in enumerate(returned or ()):
                found |= {f"step {index + 1}, {k}": hashed(timeless(v)) for k, v in item.items()}
            outcome.write_text(json.dumps(found))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(child, 0)
    if not outcome.exists():
        raise RuntimeError(f"{name} failed:\n{log.read_text()[-5000:]}")
    found: dict[str, str] = json.loads(outcome.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(recipes.RECIPES)}; none is all")
    parser.add_argument("--keep", type=Path, help="an empty folder in which the runs are kept")
    arguments = parser.parse_intermixed_args()
    if unknown := set(arguments.names) - set(recipes.RECIPES):
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    written = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    here, there, runs = machine(), written.get("machine"), written.get("runs", {})
    if arguments.what == "check" and here != there:
        print(f"hashes of weights may differ: written with {there}, this is {here}")
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        import_once(Path(temporary))
        for name in arguments.names or recipes.RECIPES:
            began = time.perf_counter()
            found = compute(name, (root / name).absolute())
            took = f"({time.perf_counter() - began:.0f} s)"
            if arguments.what == "write":
                runs[name] = found
                print(f"{name}: {len(found)} parts {took}", flush=True)
                continue
            before = runs.get(name, {})
            wrong = sorted(
                part for part in before.keys() | found.keys() if before.get(part) != found.get(part)
            )
            different += bool(wrong)
            print(
                f"{name}: {', '.join(wrong) + ' differ' if wrong else 'equal'} {took}", flush=True
            )
    if arguments.what == "write":
        text = json.dumps({"machine": here, "runs": runs}, indent=1)
        arguments.file.write_text(text + "\n")
    elif different:
        print(f"{different} runs differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

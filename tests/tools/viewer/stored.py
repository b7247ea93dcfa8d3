"""Run directories made by hand, without a model."""

import json

from tests.kit.builders import call, trace
from tuner.traces import TraceStore

TINY = "models/tiny_math"


def store_run(path, traces, *, metrics=(), model=None):
    """A run directory that holds `traces` and rows of metrics."""
    store = TraceStore(path / "traces")
    for item in traces:
        store.append(item)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    model_path = "null" if model is None else str(model)
    (path / "config.yaml").write_text(
        f"project: p\nbuffer: {{total_steps: 9}}\nmodel: {{model_path: {model_path}}}\n"
    )
    return path


def small(task, rollout, reward, **fields):
    return trace(task, rollout, [call("c", [1, 2], [3], [-0.5])], reward=reward, **fields)


def read_data(html):
    """What a browser would find in the page's data element."""
    start = html.index('id="data">') + len('id="data">')
    return json.loads(html[start : html.index("</script>", start)])

"""What W&B, SwanLab and MLflow have stored of a run, read as their own programs read it.

Each reader gives the runs of a folder, oldest first, as `Stored`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import yaml
from swanlab.converter.wb.wbdatastore import WBDataStoreReader
from swanlab.proto.swanlab.record.v1.record_pb2 import Record as SwanLabRecord
from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
from swanlab.sdk.internal.core_python.store import DataStoreReader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2


@dataclass
class Stored:
    """A run: its id and name, whether it ended well, its settings, and `metrics[step][name]`.

    `tables` has each table's rows by the table's name, a dict each.
    """

    id: str = ""
    name: str = ""
    well: bool | None = None
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))


def wandb(folder: Path) -> list[Stored]:
    return [_wandb_run(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _wandb_run(path: Path) -> Stored:
    run = Stored()
    with WBDataStoreReader() as reader:
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run.id, run.name = record.run.run_id, record.run.display_name
                run.config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "exit":
                run.well = record.exit.exit_code == 0
            elif kind == "history":
                step = record.history.step.num
                for item in record.history.item:
                    name, *part = [item.key] if item.key else item.nested_key
                    value = json.loads(item.value_json)
                    if part == ["path"]:
                        table = json.loads((path.parent / "files" / value).read_text())
                        rows = [dict(zip(table["columns"], r, strict=True)) for r in table["data"]]
                        run.tables[name] += rows
                    elif not part and not name.startswith("_"):
                        run.metrics[step][name] = value
    return run


def swanlab(folder: Path) -> list[Stored]:
    return [_swanlab_run(path) for path in sorted(folder.glob("swanlog/run-*/run-*.swanlab"))]


def _swanlab_run(path: Path) -> Stored:
    settings = path.parent / "files" / "config.yaml"
    run = Stored(config=yaml.safe_load(settings.read_text()) if settings.exists() else {})
    reader = DataStoreReader()
    reader.open(path)
    for data in reader:
        record = SwanLabRecord.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "start":
            run.id, run.name = record.start.id, record.start.name
        elif kind == "finish":
            run.well = record.finish.state == RunState.RUN_STATE_FINISHED
        elif kind == "scalar":
            run.metrics[record.scalar.step][record.scalar.key] = record.scalar.value.number
        elif kind == "media":
            for item in record.media.value.items:
                shown = json.loads((path.parent / "media/echarts" / item.filename).read_text())
                run.tables[record.media.key] += shown["rowData"]
    reader.close()
    return run


def mlflow_runs(uri: str, experiment: str) -> list[Stored]:
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(experiment)
    return [
        _mlflow_run(client, one)
        for one in client.search_runs([found.experiment_id], order_by=["start_time"])
    ]


def _mlflow_run(client: mlflow.MlflowClient, one: Any) -> Stored:
    id = one.info.run_id
    well = {"FINISHED": True, "FAILED": False}.get(one.info.status)
    run = Stored(id, one.info.run_name, well)
    run.config = mlflow.artifacts.load_dict(f"runs:/{id}/config.json")
    for name in one.data.metrics:
        for metric in client.get_metric_history(id, name):
            run.metrics[metric.step][name] = metric.value
    for artifact in client.list_artifacts(id, "samples"):
        name = artifact.path.removesuffix(".json")
        table = mlflow.artifacts.load_dict(f"runs:/{id}/{artifact.path}")
        run.tables[name] = [dict(zip(table["columns"], r, strict=True)) for r in table["data"]]
    return run


def tensorboard(folder: Path) -> tuple[dict[int, dict[str, float]], dict[str, list[str]]]:
    """Metrics, and the markdown of each table."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    metrics: dict[int, dict[str, float]] = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            metrics[event.step][name] = event.value
    texts = {
        name.removesuffix("/text_summary"): [
            event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)
        ]
        for name in events.Tags()["tensors"]
    }
    return metrics, texts

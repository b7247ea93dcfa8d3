"""One short step of training on an environment, and what it left."""

from __future__ import annotations

from tuner import TunerModelConfig, tune
from tuner.traces import TraceStore

SETTINGS = (
    "algorithm.repeat_times=2",
    "buffer.total_steps=1",
    "explorer.eval_interval=0",
    "explorer.eval_on_startup=false",
    "explorer.max_retry_times=0",
    "model.max_response_tokens=6",
    "tuner.signal_patience=9",
)


def trained(environment, model, folder, *overrides, name="run", **given):
    """The traces of the step, in the order of their rollouts."""
    result = tune(
        environment=environment,
        model=TunerModelConfig(model_path=str(model), max_model_len=250),
        experiment_name=name,
        overrides=[*SETTINGS, f"checkpoint_root_dir={folder}", *overrides],
        **given,
    )
    traces = TraceStore(result.run_dir / "traces").read("train", 1)
    return sorted(traces, key=lambda trace: (trace.id.task, trace.id.rollout))

"""The agent that may try again learns, whichever way it is written."""

from pathlib import Path

from tuner.traces import TraceStore

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_turn_math"


def test_both_ways_raise_the_held_out_reward(main, tmp_path):
    quickly = [  # few small steps, and long ones
        "buffer.total_steps=4",
        "buffer.batch_size=8",
        "algorithm.optimizer.lr=0.001",
        "algorithm.optimizer.lr_scheduler_type=constant",
    ]
    found = main.main(["--problems", "50", *quickly, f"checkpoint_root_dir={tmp_path}"])
    start = found["before"]
    for way in main.WAYS:
        assert found[way].first > start.first + 0.2
        assert found[way].within_three >= found[way].first
        assert found[way].tries < start.tries


def test_both_ways_sample_the_same(main, tmp_path):
    settings = [
        "buffer.total_steps=1",
        "buffer.batch_size=2",  # in which no try is without its <think>
        "tuner.deterministic=true",
        f"checkpoint_root_dir={tmp_path}",
    ]
    sampled = []
    for way in main.WAYS:
        traces = TraceStore(Path(main.train(way, settings)).parents[1] / "traces")
        sampled.append(
            {
                str(trace.id): [(call.prompt_ids, call.completion_ids) for call in trace.calls]
                for trace in traces.read("train", 1)
            }
        )
    assert sampled[0] == sampled[1]
    assert max(len(calls) for calls in sampled[0].values()) == 3

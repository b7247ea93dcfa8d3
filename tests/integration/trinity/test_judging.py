"""A judge of groups on Trinity-RFT's workers: it sees whole groups, also when a run goes on."""

from tests.integration.trinity.test_workflow import opened, talk
from tuner import JudgeOutput
from tuner.trinity import workflow as adapter
from tuner.trinity.progress import Journal


def ranking(seen):
    async def rank(task, responses):
        seen.append(len(responses))
        return [JudgeOutput(reward=n, feedback=f"place {n}") for n in range(len(responses))]

    return rank


async def test_a_group_is_judged_together(tmp_path):
    seen = []
    async with opened(tmp_path) as bench:
        _, experiences = await bench.run(talk, judge=ranking(seen), repeat=4)
        traces = bench.traces()
    assert seen == [4]
    assert sorted(trace.reward for trace in traces) == [0, 1, 2, 3]
    assert all(trace.feedback == f"place {trace.reward:g}" for trace in traces)
    assert {e.reward for e in experiences} == {0, 1, 2, 3}


async def test_a_group_of_which_a_part_is_known_is_made_and_judged_again(tmp_path):
    seen = []
    async with opened(tmp_path) as bench:
        for repeat in (2, 3, 3):
            await bench.run(talk, judge=ranking(seen), repeat=repeat)
            stored = tmp_path / "traces" / "step_000001.jsonl"
            Journal(tmp_path).replay([stored])
            adapter._step_before.cache_clear()  # a run that goes on has new workers
        traces = bench.traces()
    assert seen == [2, 3], "the last time all three are known"
    assert sorted(trace.reward for trace in traces) == [0, 1, 2]

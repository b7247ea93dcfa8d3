"""What is refused because Trinity-RFT would read it as something else."""

from tuner.trinity.refusals import refused, tuner_section


def test_arguments_of_one_tracker_are_refused_by_name():
    args = {"api_key": "x", "wandb": {"mode": "offline"}, "samples": 2}
    problems = [problem.text for problem in refused({"monitor": {"monitor_args": args}})]
    assert [text.split()[0] for text in problems] == [
        "monitor.monitor_args.samples",
        "monitor.monitor_args.wandb",
    ]
    assert "put the arguments into monitor.monitor_args itself" in problems[0]
    assert not list(refused({"monitor": {"monitor_args": {"api_key": "x"}}}))


def test_adapters_by_role_are_refused():
    (problem,) = refused({"model": {"adapters": {"writer": {}}}})
    assert problem.path == "model.adapters"
    assert "set model.lora_configs instead, or set tuner.backend to local" in problem.text


def test_an_environment_is_brought_there_but_no_queue_agents():
    problems = []
    assert tuner_section({"environment": {"kind": "program", "command": ["x"]}}, problems)
    assert tuner_section({"environment": "mine.py:environment"}, problems)
    assert problems == []
    tuner_section({"environment": {"type": "mine"}}, problems)
    assert [problem.path for problem in problems] == ["tuner.environment.type"]

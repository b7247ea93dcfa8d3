"""Layers, keys, values and messages of the configuration."""

from __future__ import annotations

import json
import os
import stat
import string
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tuner.config import RemoteModel, RunConfig, load_config
from tuner.config.foreign import FOREIGN, SameAs, find_foreign
from tuner.config.keys import known_paths, nearest, schema_paths
from tuner.config.schema import LoraSection
from tuner.config.source import MASK, concealed, secret_references, without_secrets
from tuner.errors import ConfigError
from tuner.runs.record import open_directory

REPOSITORY = Path(__file__).resolve().parents[2]

# AgentScope's official example but for the number of GPUs and engines.
OFFICIAL = """\
project: AgentScope
name: GSM8K-Qwen3-0.6B
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-0.6B}
  max_response_tokens: 16384
  max_model_len: 24576
  temperature: 1.0
cluster:
  node_num: 1
  gpu_per_node: 1
buffer:
  total_epochs: 1
  batch_size: 32
  train_batch_size: 256
  explorer_input:
    taskset:
      name: gsm8k
      path: 'openai/gsm8k'
      subset_name: 'main'
      split: 'train'
explorer:
  runner_per_model: 16
  max_timeout: 600
  rollout_model:
    engine_num: 1
    tensor_parallel_size: 1
    enable_openai_api: true
    enable_history: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    reasoning_parser: deepseek_r1
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: 'nccl'
  sync_interval: 1
  sync_timeout: 1800
trainer:
  save_interval: 100
  use_dynamic_bsz: true
  ulysses_sequence_parallel_size: 1
monitor:
  monitor_type: tensorboard
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path | None = None, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_agentscopes_example_file_is_read(write):
    config = load_config(write(OFFICIAL))
    assert config.model.model_path == "Qwen/Qwen3-0.6B"
    assert config.model.max_response_tokens == 16384
    assert config.buffer.explorer_input.taskset.subset_name == "main"
    assert config.monitor.monitor_type == ("tensorboard",)


def test_values_that_need_a_cluster_are_refused_together_with_file_and_line(write):
    path = write(
        OFFICIAL.replace("gpu_per_node: 1", "gpu_per_node: 8").replace("num: 1\n", "num: 4\n")
    )
    message = refusal(path)
    assert message.startswith("3 problems")
    assert (
        f"{path}:14: cluster.gpu_per_node is 8: the local backend uses at most one GPU" in message
    )
    assert "cluster.node_num is 4" in message
    assert "explorer.rollout_model.engine_num is 4" in message
    assert "remove it, or set explorer.rollout_model.engine_type to vllm" in message


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("synchronizer.sync_interval=2", "gets new weights after every step"),
        ("synchronizer.sync_style=fully_async", "always has the newest weights"),
        ("explorer.rollout_model.enable_openai_api=false", "set it to true"),
        ("explorer.rollout_model.tensor_parallel_size=2", "the trainer's weights"),
        ("explorer.rollout_model.gpu_memory_utilization=0.9", "engine_type to vllm"),
        ("explorer.rollout_model.dtype=bfloat16", "set tuner.dtype (now auto)"),
        ("explorer.rollout_model.max_model_len=5", "set model.max_model_len (now not set)"),
        ("trainer.use_dynamic_bsz=false", "max_token_len_per_gpu"),
        ("explorer.rollout_model.enable_lora=true", "trained with model.lora_configs"),
        ("model.tinker.enable=true", "does not use Tinker"),
        ("buffer.explorer_input.taskset.repeat_times=4", "set algorithm.repeat_times (now 8)"),
        ("data_processor.task_pipeline.num_process=2", "not in this version"),
        ("algorithm.advantage_fn_args.enable_step_norm=true", "set it to false"),
    ],
)
def test_trinity_keys_are_refused_where_they_would_ask_for_something_else(override, text):
    message = refusal(overrides=[override])
    key = override.partition("=")[0]
    assert message.startswith(f"override {override!r}: {key} is ")
    assert text in message


@pytest.mark.parametrize(
    "override",
    [
        "synchronizer.sync_method=checkpoint",
        "synchronizer.sync_offset=2",
        "algorithm.sample_strategy_args={}",
        "explorer.max_inflight_batches=4",
        "cluster.node_num=1",
        "cluster.gpu_per_node=0",
        "buffer.train_batch_size=256",
        "buffer.train_batch_size=0",
        "explorer.rollout_model.dtype=auto",
        "explorer.rollout_model.seed=42",
        "algorithm.kl_penalty_fn=none",
        "trainer.ulysses_sequence_parallel_size=1",
        "explorer.dynamic_timeout={enable: false, ratio: 3}",
        "stages=[]",
    ],
)
def test_trinity_keys_are_accepted_where_this_backend_does_what_they_ask(override):
    load_config(overrides=[override])


def test_train_batch_size_must_be_all_rollouts_of_a_step():
    message = refusal(overrides=["buffer.train_batch_size=100"])
    assert "buffer.batch_size 32 x algorithm.repeat_times 8 = 256" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("algorithm.repeat_time", "algorithm.repeat_times"),
        ("algorithm.batch_size", "buffer.batch_size"),
        ("algorithm.lr", "algorithm.optimizer.lr"),
        ("algorithm.learning_rate", "algorithm.optimizer.lr"),
        ("group_size", "algorithm.repeat_times"),
        ("model.path", "model.model_path"),
        ("model.max_tokens", "model.max_response_tokens"),
        ("algoritm", "algorithm"),
        ("explorer.eval_intervall", "explorer.eval_interval"),
        ("explorer.auxiliary_models.0.path", "explorer.auxiliary_models.0.model_path"),
        ("tuner.on_failure.penalise", "tuner.on_failure.penalize"),
        ("cluster.gpus_per_node", "cluster.gpu_per_node"),
    ],
)
def test_unknown_keys_get_the_key_that_was_meant(key, meant):
    assert nearest(key) == meant


def test_unknown_key_in_a_file_names_the_line(write):
    path = write("project: x\nmodel:\n  temprature: 1\n")
    assert (
        refusal(path) == f"{path}:3: unknown key model.temprature; did you mean model.temperature?"
    )


def test_nothing_is_suggested_for_a_key_like_no_other():
    assert "docs/reference/configuration.md" in refusal(overrides=["xyzzy=1"])


def test_wrong_types_name_key_value_and_meaning(write):
    message = refusal(write("algorithm: {optimizer: {lr: fast}, repeat_times: 0}\nbuffer: 3\n"))
    assert "algorithm.optimizer.lr is 'fast': must be a valid number" in message
    assert "(Learning rate after the warmup.)" in message
    assert "algorithm.repeat_times is 0: must be greater than or equal to 1" in message
    assert "buffer is 3: must have keys under it" in message
    assert "true or false" in refusal(overrides=["model.temperature=true"])
    assert "'sft' or 'dpo'" in refusal(overrides=["algorithm.algorithm_type=pppo"])
    assert "{penalize: value}" in refusal(overrides=["tuner.on_failure=explode"])
    assert "'auto', 'local' or 'trinity'" in refusal(overrides=["tuner.backend=slurm"])


def test_overrides_that_do_not_parse():
    assert "override 'a.b' has no '='" in refusal(overrides=["a.b"])
    assert "has no key before '='" in refusal(overrides=["=3"])
    assert "does not parse as YAML" in refusal(overrides=["model.top_p=[1"])
    both = refusal(overrides=["a.b", "model.top_p=2"])
    assert both.startswith("2 problems")


def test_bad_yaml_names_file_and_line(write):
    path = write("project: x\nmodel:\n  a: [1\nb: 2\n")
    assert refusal(path).startswith(f"{path}:4: not valid YAML")
    path = write("model:\n  top_p: 1\n  top_p: 2\n")
    assert refusal(path).startswith(f"{path}:3: not valid YAML: found duplicate key")
    assert "expected keys" in refusal(write("- a\n- b\n"))
    assert "expected keys" in refusal(write("just text\n"))
    assert "does not exist" in refusal(Path("nowhere.yaml"))


def test_environment_is_read_and_a_missing_variable_is_named(write, monkeypatch):
    path = write("buffer:\n  batch_size: ${oc.env:TUNER_TEST_BATCH}\nmodel:\n  top_p: 2\n")
    message = refusal(path)
    assert f"{path}:2: buffer.batch_size cannot be resolved" in message
    assert "TUNER_TEST_BATCH is not set" in message
    assert "${oc.env:TUNER_TEST_BATCH,default}" in message
    assert "model.top_p is 2" in message
    monkeypatch.setenv("TUNER_TEST_BATCH", "4")
    assert load_config(path, overrides=["model.top_p=1"]).buffer.batch_size == 4


def test_interpolations_see_overrides(write):
    path = write(
        "model: {max_model_len: 100}\ntrainer: {max_token_len_per_gpu: '${model.max_model_len}'}"
    )
    assert (
        load_config(path, overrides=["model.max_model_len=50"]).trainer.max_token_len_per_gpu == 50
    )


def test_when_set_chooses_by_environment(write, monkeypatch):
    path = write("buffer: {batch_size: '${tuner.when_set:TUNER_TEST_GPU,32,4}'}")
    monkeypatch.delenv("TUNER_TEST_GPU", raising=False)
    assert load_config(path).buffer.batch_size == 4
    monkeypatch.setenv("TUNER_TEST_GPU", "yes")
    assert load_config(path).buffer.batch_size == 32


VLLM = ["explorer.rollout_model.engine_type=vllm"]


@settings(max_examples=15, deadline=None)
@given(
    layers=st.tuples(*[st.none() | st.integers(1, 1000) for _ in range(3)]),
    key=st.sampled_from(["buffer.batch_size", "explorer.runner_per_model", "tuner.max_slots"]),
)
def test_later_layers_win_and_absent_ones_change_nothing(tmp_path_factory, layers, key):
    in_file, in_python, on_line = layers
    section, name = key.split(".")
    path = tmp_path_factory.mktemp("c") / "c.yaml"
    path.write_text("" if in_file is None else f"{section}:\n  {name}: {in_file}\n")
    config = load_config(
        path,
        settings={} if in_python is None else {section: {name: in_python}},
        overrides=[] if on_line is None else [f"{key}={on_line}"],
    )
    default = RunConfig.model_fields[section].default.model_dump()[name]
    given_values = [value for value in (on_line, in_python, in_file, default) if value is not None]
    assert getattr(getattr(config, section), name) == given_values[0]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], 48),
        (["explorer.runner_per_model=16"], 16),
        (["tuner.max_slots=20"], 20),
        (["buffer.batch_size=60"], 64),
        (["buffer.batch_size=1", "algorithm.repeat_times=2"], 8),
        (["tuner.max_slots=100", "synchronizer.sync_offset=1"], 96),
        ([*VLLM, "explorer.rollout_model.engine_num=2", "buffer.batch_size=60"], 128),
        ([*VLLM, "tuner.engine.urls=[http://a:1]"], 8),
    ],
)
def test_as_many_rollouts_as_the_engine_holds_and_a_step_has(overrides, wanted):
    config = load_config(overrides=["buffer.batch_size=6", *overrides])
    assert config.concurrent_rollouts == wanted


@pytest.mark.parametrize("value", ["all", "true", "0"])
def test_other_numbers_of_rollouts_are_refused(value):
    with pytest.raises(ConfigError, match=r"explorer\.runner_per_model"):
        load_config(overrides=[f"explorer.runner_per_model={value}"])


names_of_folders = st.text(min_size=1).filter(
    lambda text: text.isprintable() and text.strip() == text and Path(text).name == text != ".."
)


@settings(max_examples=15, deadline=None)
@given(
    name=names_of_folders,
    template=st.none() | st.sampled_from(["${x}", "{{ a }}", "null", "1e6", "a: b\nc"]),
    lr=st.floats(1e-9, 1),
    steps=st.none() | st.integers(1, 100),
    monitors=st.lists(st.sampled_from(["wandb", "tensorboard"]), unique=True),
    failure=st.sampled_from(["drop", "abort", {"penalize": -0.5}]),
)
@example(name="1e6", template="1e6", lr=1.0, steps=None, monitors=[], failure="drop")
def test_effective_configuration_reads_back_unchanged(
    tmp_path_factory, name, template, lr, steps, monitors, failure
):
    folder = tmp_path_factory.mktemp("c")
    tree = {
        "name": name,
        "checkpoint_root_dir": str(folder / "runs"),
        "algorithm": {"optimizer": {"lr": lr}},
        "model": {"custom_chat_template": template, "model_path": "Qwen/Qwen3-0.6B"},
        "buffer": {"total_steps": steps, "explorer_input": {"eval_tasksets": [{"path": "a/b"}]}},
        "monitor": {"monitor_type": monitors},
        "tuner": {"on_failure": failure},
    }
    config = RunConfig.model_validate(tree)
    saved = folder / "config.yaml"
    saved.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(saved) == config


def test_total_steps_has_two_names(write):
    path = write("trainer: {total_steps: 7}")
    assert load_config(path).buffer.total_steps == 7
    assert load_config(path, overrides=["buffer.total_steps=9"]).buffer.total_steps == 9
    assert load_config(path, overrides=["trainer.total_steps=9"]).buffer.total_steps == 9
    in_python = {"buffer": {"total_steps": None}}
    assert load_config(path, settings=in_python).buffer.total_steps is None
    path = write("trainer: {total_steps: 7}\nbuffer: {total_steps: 8}")
    assert "trainer.total_steps is 7, but buffer.total_steps is 8" in refusal(path)


def test_relative_paths_start_where_they_are_written(write, tmp_path, monkeypatch):
    here = tmp_path / "here"
    for folder in (tmp_path / "data", tmp_path / "model", here / "other"):
        folder.mkdir(parents=True)
    path = write(
        "checkpoint_root_dir: runs\nmodel: {model_path: model}\n"
        "buffer: {explorer_input: {taskset: {path: data}, eval_tasksets: [{path: no/such}]}}\n"
        "tuner: {workflow: 'agent.py:run', judge: 'pkg.mod:judge'}"
    )
    monkeypatch.chdir(here)
    config = load_config(path)
    assert config.checkpoint_root_dir == tmp_path / "runs"
    assert config.model.model_path == str(tmp_path / "model")
    assert config.buffer.explorer_input.taskset.path == str(tmp_path / "data")
    assert config.buffer.explorer_input.eval_tasksets[0].path == "no/such"
    assert config.tuner.workflow == f"{tmp_path / 'agent.py'}:run"
    assert config.tuner.judge == "pkg.mod:judge"
    config = load_config(path, overrides=["model.model_path=other", "checkpoint_root_dir=x"])
    assert config.model.model_path == str(here / "other")
    assert config.checkpoint_root_dir == here / "x"
    in_python = {"buffer": {"explorer_input": {"taskset": {"path": "other"}}}}
    taskset = load_config(path, settings=in_python).buffer.explorer_input.taskset
    assert taskset.path == str(here / "other")


def test_evaluation_is_greedy_unless_said_otherwise(write):
    path = write(
        "model: {temperature: 0.7, max_response_tokens: 9}\n"
        "buffer: {explorer_input: {eval_tasksets: "
        "[{}, {name: b, rollout_args: {temperature: null}}]}}"
    )
    config = load_config(path)
    inputs = config.buffer.explorer_input
    assert config.rollout_args(inputs.taskset).temperature == 0.7
    assert config.rollout_args(inputs.taskset).max_tokens == 9
    assert config.rollout_args(inputs.eval_tasksets[0]).temperature == 0
    assert config.rollout_args(inputs.eval_tasksets[1]).temperature == 0.7


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.max_model_len=64", "model.max_response_tokens=64"], "leaves no room for a prompt"),
        (
            ["model.custom_chat_template=x", "model.chat_template_path=y"],
            "set one of them",
        ),
        (
            [
                "algorithm.optimizer.lr_warmup_steps=3",
                "algorithm.optimizer.lr_warmup_steps_ratio=0.1",
            ],
            "set one of them",
        ),
        (
            ["tuner.reasoning=keep", "explorer.rollout_model.reasoning_parser=none"],
            "reasoning_parser is none: the reasoning in an answer cannot be identified",
        ),
        (["buffer.explorer_input.eval_tasksets=[{}, {}]"], "eval_tasksets.1.name is 'eval'"),
        (["buffer.explorer_input.eval_tasksets=[{name: train}]"], "which is taken"),
        (
            ["buffer.explorer_input.eval_tasksets=[{repeat_times: 4}]"],
            "eval_tasksets.0.repeat_times is 4, but buffer.explorer_input.eval_tasksets.0."
            "rollout_args.temperature is 0",
        ),
        (["buffer.explorer_input.taskset.rollout_args.temperature=0"], "nothing to learn from"),
    ],
)
def test_contradictions_are_refused(overrides, text):
    message = refusal(overrides=overrides)
    assert any(part in message for part in text.split("|"))


def test_empty_sections_say_nothing(write):
    assert load_config(
        write("name: a\nmodel:\ncluster:\nbuffer:\n  explorer_input:\n")
    ) == load_config(overrides=["name=a"])


def test_run_without_a_name_is_a_new_run():
    assert load_config().name.startswith("Experiment-2")


def test_root_config_trains_the_tiny_model_or_the_real_one(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TUNER_")]:
        monkeypatch.delenv(name)
    path = REPOSITORY / "config.yaml"
    tiny = load_config(path)
    assert tiny.model.model_path.endswith("models/tiny_math")
    assert tiny.buffer.explorer_input.taskset.path == str(REPOSITORY / "examples/gsm8k/data")
    monkeypatch.setenv("TUNER_MODEL_PATH", "Qwen/Qwen3-1.7B")
    monkeypatch.setenv("TUNER_DATASET", "openai/gsm8k")
    real = load_config(path)
    assert real.model.model_path == "Qwen/Qwen3-1.7B"
    assert real.buffer.explorer_input.taskset.path == "openai/gsm8k"
    assert real.buffer.explorer_input.eval_tasksets[0].path == "openai/gsm8k"
    assert real.algorithm.optimizer.lr < tiny.algorithm.optimizer.lr
    assert real.name != tiny.name


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("{lora_rank: 0}", "lora_rank is 0: must be greater than or equal to 1"),
        ("{lora_rnk: 8}", "did you mean model.lora_configs.0.lora_rank?"),
        ("{lora_dtype: bfloat16}", "lora_dtype is 'bfloat16': must be 'auto' or 'float32'"),
        ("{is_dummy: true}", "set it to false"),
        ("{target_modules: []}", "must name at least one layer"),
        ("{path: a/b/c, exclude_modules: [x]}", "exclude_modules is set together with path"),
        ("{}, {}", "only one adapter can be trained"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(item, text):
    message = refusal(overrides=[f"model.lora_configs=[{item}]"])
    assert "model.lora_configs" in message
    assert text in message


def test_trinitys_lora_keys_are_read(write):
    path = write(
        "model:\n  lora_configs:\n  - {name: mine, path: ./here/adapter, base_model_name: org/base,"
        " lora_rank: 8, lora_alpha: 16, lora_dtype: auto, is_dummy: false}\n"
    )
    config = load_config(path)
    assert config.model.lora == LoraSection(
        path=str(path.parent / "here/adapter"),
        base_model_name="org/base",
        lora_rank=8,
        lora_alpha=16,
    )
    for nothing in ("null", "[]"):
        assert load_config(path, overrides=[f"model.lora_configs={nothing}"]).model.lora is None
    layers = load_config(overrides=["model.lora_configs=[{target_modules: [q_proj, v_proj]}]"])
    assert layers.model.lora.target_modules == ("q_proj", "v_proj")


def test_each_role_has_an_adapter_or_none(write):
    """Written and read back; paths are relative to the file."""
    path = write(
        "model:\n  adapters:\n    writer: {lora_rank: 4, path: ./adapter}\n    critic: frozen\n"
        "    default: {}\n"
    )
    config = load_config(path)
    assert config.model.adapters == {
        "writer": LoraSection(lora_rank=4, path=str(path.parent / "adapter")),
        "critic": "frozen",
        "default": LoraSection(),
    }
    assert list(config.model.loras) == ["model.adapters.writer", "model.adapters.default"]
    path.write_text(config.to_yaml())
    assert load_config(path).model.adapters == config.model.adapters
    assert load_config(path, overrides=["model.adapters=null"]).model.loras == {}


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("{w: {lora_rank: 0}}", "model.adapters.w.lora_rank is 0: must be greater than"),
        ("{w: {lora_rnk: 8}}", "did you mean model.adapters.w.lora_rank?"),
        ("{w: froze}", "model.adapters.w is 'froze': must be 'frozen'"),
        ("{w: null}", "model.adapters.w is None: must have keys under it"),
        ("{w: frozen, c: frozen}", "nothing is trained if all are frozen"),
        ("{'a b': {}}", "model.adapters.a b"),
    ],
)
def test_roles_that_cannot_be_trained_are_refused(roles, text):
    message = refusal(overrides=[f"model.adapters={roles}"])
    assert text in message
    assert "problems in" not in message


def test_no_key_is_listed_twice():
    paths = known_paths()
    assert len(paths) == len(set(paths))


def test_every_rule_about_a_foreign_key_counts_and_has_a_reason():
    """No rule is hidden by one before it, or is about a key of our own."""
    own = set(schema_paths())
    assert len(FOREIGN) == len({row.path for row in FOREIGN})
    for row in FOREIGN:
        assert find_foreign(row.path.replace("*", "0")) is row
        assert row.path not in own
        assert row.why
        assert row.why == row.why.strip(" .")
        if isinstance(row.accepts, SameAs):
            assert row.accepts.path in own


def doubled(text: str, last: str, levels: int = 40) -> str:
    """Lines of YAML: `text` for each level K, which names level N twice, and the last one."""
    return "".join(
        text.replace("K", str(at)).replace("N", str(at + 1)) + "\n" for at in range(levels)
    ) + last.replace("K", str(levels))


MULTIPLIED = {
    "texts": doubled("kK: ${kN}${kN}", "kK: x"),
    "lists": doubled("kK: ['${kN}', '${kN}']", "kK: [x]"),
    "keys": doubled("kK: {a: '${kN}', b: '${kN}'}", "kK: {a: x}"),
    "oc.select": doubled("kK: ${oc.select:kN}${oc.select:kN}", "kK: x"),
    "quoted": doubled("kK: ${oc.select:'kN'}${oc.select:\"kN\"}", "kK: x"),
    "defaults": doubled("kK: ${oc.env:NO,${kN}}${oc.env:NO,${kN}}", "kK: x"),
    "relative": "a:\n  b:\n" + doubled("    kK: ${.kN}${..b.kN}", "    kK: x"),
    "indices": "k:\n" + doubled("- ${k[N]}${k.N}", "- x"),
    "through another": doubled("kK: {x: '${mK.x}${mK.x}'}\nmK: ${kN}", "kK: {x: 1}"),
    "computed": doubled("kK: ${${nN}}${${nN}}\nnN: kN", "kK: x"),
    "a long text": f"a: {'x' * 100_000}\nb: {'${a}' * 1000}\nproject: ${{b}}${{b}}",
    "a long chain": doubled("kK: ${kN}", "kK: x", levels=3000),
}


@pytest.mark.parametrize("kind", MULTIPLIED)
def test_interpolations_that_multiply_are_refused_before_they_are_resolved(kind, write):
    with pytest.raises(ConfigError, match=r"interpolations .* more than 10000 steps"):
        load_config(write(MULTIPLIED[kind]))


def test_usual_interpolations_are_resolved(write):
    text = (
        "project: ${name}-${.name}-${oc.select:name}\nname: n\n"
        "model: {top_k: '${buffer.${oc.env:NO_SUCH,batch_size}}'}\nbuffer: {batch_size: 7}\n"
        "tuner: {workflow: '${project}:${name}'}\n"
    )
    config = load_config(write(text))
    assert (config.project, config.model.top_k) == ("n-n-n", 7)
    assert config.tuner.workflow == "n-n-n:n"


UNREAD = ["9" * 5000, *(f"!!{tag} abc" for tag in ("int", "float", "bool", "timestamp")), "&a [*a]"]


@pytest.mark.parametrize("value", UNREAD)
def test_values_that_yaml_cannot_read_are_refused(value, write):
    for load in (
        lambda: load_config(write(f"project: {value}\n")),
        lambda: load_config(overrides=[f"project={value}"]),
    ):
        with pytest.raises(ConfigError, match=r"not valid YAML|does not parse as YAML") as caught:
            load()
        assert len(str(caught.value)) < 600


def test_a_file_of_megabytes_is_refused_unread(write):
    with pytest.raises(ConfigError, match="larger than 1 MB"):
        load_config(write("a: " + "[" * 3_000_000))


def test_a_file_that_is_nested_too_deep_is_refused(write):
    with pytest.raises(ConfigError, match=r"nested too deeply|maximum nesting depth"):
        load_config(write("a: " + "[" * 3000 + "]" * 3000))
    with pytest.raises(ConfigError, match=r"nested too deeply|maximum nesting depth"):
        load_config(overrides=["name=" + "[" * 3000 + "]" * 3000])


@pytest.mark.parametrize(
    "override", ["name=../../x", "name=/elsewhere", "name=.", "project=../y", "project=.."]
)
def test_a_name_that_leads_out_of_the_root_is_refused(override):
    key, value = override.split("=")
    assert f"{key} is {value!r}, which leads out of " in refusal(overrides=[override])
    assert load_config(overrides=["name=a..b", "project=c/d"]).name == "a..b"


def test_a_name_that_no_file_system_takes_is_refused():
    with pytest.raises(ConfigError, match="name"):
        load_config(settings={"name": "a\udcff"})


IN_CLEAR = """\
name: r
monitor:
  monitor_type: mlflow
  monitor_args:
    uri: http://me:clear-1@host
    password: ${oc.env:TRACKER_PASSWORD,clear-2}
    username: ${oc.env:TRACKER_USER}
tuner:
  environment: {type: "a.py:e"}
  agent: {type: "a.py:f", args: {api_key: clear-3, hf_token: "${oc.env:HUB_TOKEN}", max_tokens: 5}}
"""


def test_secrets_are_written_as_the_reference_they_came_from_or_not(write, tmp_path, monkeypatch):
    for name in ("TRACKER_PASSWORD", "TRACKER_USER", "HUB_TOKEN"):
        monkeypatch.setenv(name, f"value of {name}")
    config = load_config(write(IN_CLEAR), overrides=[f"checkpoint_root_dir={tmp_path}"])
    assert config.monitor.monitor_args["password"] == "value of TRACKER_PASSWORD"
    assert config.monitor.monitor_args["uri"] == "http://me:clear-1@host"
    with open_directory(config, {}) as directory:
        text = directory.config.read_text()
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        directory.metrics.write_text("{}")
    assert "clear" not in text.replace("given in clear", "")
    assert "value of" not in text
    for name in ("TRACKER_PASSWORD", "TRACKER_USER", "HUB_TOKEN"):
        assert f"${{oc.env:{name}}}" in text
    # It goes on as it was started, and with other secrets, but not without those in clear.
    with open_directory(config, {}):
        pass
    message = refusal(directory.config)
    for key in ("monitor.monitor_args.uri", "tuner.agent.args.api_key"):
        assert f"{key} was given in clear text when the run was started" in message
    again = ["monitor.monitor_args.uri=http://h", "tuner.agent.args.api_key=k"]
    assert load_config(directory.config, overrides=again).monitor.monitor_args == {
        "uri": "http://h",
        "password": "value of TRACKER_PASSWORD",
        "username": "value of TRACKER_USER",
    }
    monkeypatch.delenv("TRACKER_USER")
    args = ["monitor.monitor_args={}", f"checkpoint_root_dir={tmp_path}"]
    with open_directory(load_config(write(IN_CLEAR, "new.yaml"), overrides=args), {}):
        pass
    assert "the environment variable TRACKER_USER is not set" in refusal(write(text, "old.yaml"))


def test_tags_that_would_make_objects_are_refused(write, tmp_path):
    made = tmp_path / "made"
    path = f"!!python/object/apply:pathlib.Path [{made}]"
    text = f"name: !!python/object/apply:pathlib.Path.touch [{path}]"
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write(text))
    assert not made.exists()


_SECRETS = """
api_key apikey OPENAI_API_KEY aws_access_key client_secret secret_key private_key db_password passwd
credentials credential token access_token api_token auth_token bearer_token hf_token refresh_token
"""


@pytest.mark.parametrize(
    ("path", "value", "secret"),
    [
        *((f"agent.args.{name}", "x1", True) for name in _SECRETS.split()),
        ("agent.api_key.0", "x1", True),
        ("agent.password", 1234, True),
        ("buffer.path", "postgresql://me:x1@host/db", True),
        ("buffer.path", "http://host:80/a@b", False),
        ("model.max_tokens", 5, False),
        ("agent.stop_token", "x1", False),
        ("agent.password", True, False),
        ("agent.api_key", "EMPTY", False),
        ("agent.api_key", "", False),
    ],
)
def test_what_a_secret_is(path, value, secret):
    assert concealed(value, {}, path) == (MASK if secret else value)


def test_a_reference_with_a_secret_in_clear_beside_it_is_not_kept():
    raw = {"uri": "http://me:clear@${oc.env:HOST}", "host": "http://${oc.env:HOST}"}
    found = secret_references(
        raw, {"uri": "http://me:clear@h", "host": "http://h"}, "monitor.monitor_args"
    )
    assert found == {"http://h": "http://${oc.env:HOST}"}


_BASE64 = string.ascii_letters + string.digits
_KEYS = st.builds(
    "{}{}1".format,
    st.sampled_from(["sk-", "sk-proj-", "sk-ant-api03-", "hf_", "gsk_", "ghp_", "AKIA0000"]),
    st.text(_BASE64, min_size=30, max_size=40).map(str.upper),
)
_HIDDEN = st.one_of(
    _KEYS.map(lambda key: (key, key)),
    *(
        st.text(_BASE64, min_size=20, max_size=40).map(
            lambda key, form=form: (form.format(key), key)
        )
        for form in (
            "Authorization: Bearer {}",
            "{{'x-api-key': '{}'}}",
            "https://user:{}@host/v1",
            "postgresql+psycopg://:{}@host/db",
            "https://host/v1?key={}&n=1",
            "https://host/v1?n=1&access_token={}",
        )
    ),
)


@given(st.text(), _HIDDEN, st.text())
def test_keys_are_hidden_by_their_shape(before, hidden, after):
    text, key = hidden
    assume(key not in before + after)
    shown = without_secrets(f"{before} {text} {after}")
    assert key not in shown
    assert MASK in shown
    assert without_secrets(shown) == shown


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=30))
@pytest.mark.parametrize("form", [str, repr, json.dumps, lambda key: quote(key, safe="")])
def test_keys_of_the_environment_and_the_configuration_are_hidden_whatever_they_are(form, key):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ODD_KEY", key)
        text = form(key)
        assume(text.strip("'\"") not in MASK)
        assert text.strip("'\"") not in without_secrets(f"wrong: {text}!")


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'key'",
        "basic understanding of the bearer authentication",
        "api_key: argument is missing",
        "scikit-learn-contrib, http://host:80/a@b, token=5, task-1234567890",
    ],
)
def test_texts_without_secrets_are_as_they_were(text):
    assert without_secrets(text) == text


def test_a_key_given_in_clear_text_is_hidden_in_what_is_said_later(write, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "x")
    load_config(write(IN_CLEAR.replace("clear-3", "a clear password")), overrides=["monitor={}"])
    assert without_secrets("no access with 'a clear password'") == f"no access with '{MASK}'"


@given(
    _KEYS
    | st.text(_BASE64, min_size=32, max_size=64).map(lambda key: f"{key}1")
    | st.uuids().map(str)
)
def test_a_key_where_the_name_of_a_variable_belongs_is_refused_without_repeating_it(key):
    for setting in ("tuner.engine", "tuner.serving", "tuner.auxiliary_models.a"):
        name = "admin_key_env" if setting == "tuner.serving" else "api_key_env"
        with pytest.raises(ConfigError, match=f"{setting}.{name} must be the name") as refused:
            load_config(
                settings={"tuner": {"auxiliary_models": {"a": REMOTE}}},
                overrides=[f"{setting}.{name}={key}"],
            )
        assert key not in str(refused.value)
    with pytest.raises(ValueError, match="must be the name of an environment variable") as refused:
        RemoteModel(**REMOTE, api_key_env=key)
    assert key not in str(refused.value)


REMOTE = {"base_url": "https://host/v1", "model_name": "m"}

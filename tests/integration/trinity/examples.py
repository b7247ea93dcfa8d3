"""What Trinity-RFT's examples set in which an agent or an environment makes several calls, one
setting a line; first where all of them agree."""

ALL = """
checkpoint_root_dir=${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
model.model_path=${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-7B-Instruct}
cluster.node_num=1
cluster.gpu_per_node=8
buffer.explorer_input.taskset.storage_type=file
explorer.rollout_model.dtype=bfloat16
explorer.rollout_model.seed=42
synchronizer.sync_method=nccl
"""
# By the folder of the example.
FOR_AGENTS = {
    "grpo_frozenlake_openjudge": """
project=FrozenLake-OpenJudge
name=trinity-frozen-lake-openjudge
algorithm.algorithm_type=grpo
algorithm.repeat_times=8
algorithm.optimizer.lr=1e-6
algorithm.policy_loss_fn_args={clip_range_low: 0.2, clip_range_high: 0.28}
algorithm.kl_loss_fn_args.kl_coef=0.0
algorithm.loss_agg_mode=seq-mean-token-sum
model.enable_prompt_truncation=false
model.max_response_tokens=10240
model.max_model_len=14436
model.temperature=0.7
buffer.total_epochs=1
buffer.batch_size=64
buffer.explorer_input.taskset.name=frozenlake
buffer.explorer_input.taskset.path=${oc.env:TRINITY_TASKSET_PATH}
buffer.explorer_input.taskset.split=train
buffer.explorer_input.taskset.workflow_args={env_max_steps: 8, agent_max_steps: 10, \
is_slippery: false, reward_fn_type: trajectory_accuracy_grader_reward, reward_fn_args: \
{model_name: "${oc.env:TRINITY_JUDGE_MODEL_NAME,qwen3-max}", normalize_score: true}}
buffer.explorer_input.eval_tasksets=[{name: frozenlake, storage_type: file, \
path: "${oc.env:TRINITY_TASKSET_PATH}", split: test, repeat_times: 4, workflow_args: \
{env_max_steps: 8}, rollout_args: {top_p: 0.8, top_k: 20}}]
buffer.explorer_input.default_workflow_type=frozen_lake_workflow
explorer.eval_on_startup=true
explorer.eval_interval=10
explorer.runner_per_model=8
explorer.rollout_model.engine_num=6
explorer.rollout_model.tensor_parallel_size=1
explorer.rollout_model.enable_chunked_prefill=true
explorer.rollout_model.enforce_eager=false
explorer.rollout_model.gpu_memory_utilization=0.85
trainer.trainer_type=verl
trainer.save_interval=1000
trainer.use_dynamic_bsz=true
trainer.max_token_len_per_gpu=16384
trainer.ulysses_sequence_parallel_size=1
trainer.trainer_config.actor_rollout_ref={hybrid_engine: true, model: \
{use_remove_padding: true, enable_gradient_checkpointing: true}, actor: {fsdp_config: \
{param_offload: true, optimizer_offload: true}}, ref: {fsdp_config: {param_offload: true}}}
synchronizer.sync_interval=1
synchronizer.sync_timeout=1200
""",
    "grpo_intercode_sql": """
project=INTERCODE_SQL
name=INTERCODE_SQL_RFT
algorithm.algorithm_type=grpo
algorithm.repeat_times=8
algorithm.optimizer.lr=1e-6
model.max_prompt_tokens=10240
model.max_response_tokens=4096
model.max_model_len=16384
buffer.total_epochs=20
buffer.batch_size=8
buffer.explorer_input.taskset.name=intercode_sql
buffer.explorer_input.taskset.path=examples/grpo_intercode_sql/intercode_sql_data
buffer.explorer_input.taskset.split=train
buffer.explorer_input.taskset.format.prompt_key=query_idx
buffer.explorer_input.taskset.rollout_args={temperature: 1.0, logprobs: 0}
buffer.explorer_input.taskset.workflow_args={image_name: docker-env-sql, max_env_steps: 10, \
auto_submit: true, verbose: false}
buffer.explorer_input.taskset.default_workflow_type=intercode_sql_workflow
buffer.trainer_input.experience_buffer={name: intercode_sql_buffer, storage_type: queue, \
path: "sqlite:///intercode_sql.db"}
explorer.runner_per_model=8
explorer.max_timeout=3600
explorer.rollout_model.engine_num=2
explorer.rollout_model.tensor_parallel_size=2
explorer.rollout_model.enable_prefix_caching=false
explorer.rollout_model.enforce_eager=true
explorer.rollout_model.gpu_memory_utilization=0.7
explorer.rollout_model.enable_chunked_prefill=true
synchronizer.sync_interval=8
synchronizer.sync_timeout=1200
trainer.save_interval=10
trainer.grad_clip=1.0
trainer.use_dynamic_bsz=true
trainer.max_token_len_per_gpu=16384
trainer.ulysses_sequence_parallel_size=1
""",
    "grpo_alfworld_general_multi_step": """
project=ALFWORLD
name=Step_Wise_Alfworld
algorithm.algorithm_type=multi_step_grpo
algorithm.repeat_times=16
algorithm.optimizer.lr=5e-6
model.enable_thinking=false
model.max_response_tokens=16384
model.max_model_len=20480
cluster.ray_address=${oc.env:TRINITY_RAY_ADDRESS,auto}
buffer.total_epochs=20
buffer.batch_size=16
buffer.train_batch_size=7680
buffer.explorer_input.taskset.name=alfworld
buffer.explorer_input.taskset.path=examples/grpo_alfworld/alfworld_data
buffer.explorer_input.taskset.format.prompt_key=game_file
buffer.explorer_input.taskset.rollout_args={temperature: 1.0, logprobs: 0}
buffer.explorer_input.taskset.workflow_args.max_env_steps=30
buffer.explorer_input.taskset.enable_progress_bar=false
buffer.explorer_input.taskset.default_workflow_type=step_wise_alfworld_workflow
buffer.trainer_input.experience_buffer={name: alfworld_buffer, storage_type: queue, \
replay_buffer: {enable: true}}
explorer.max_repeat_times_per_runner=1
explorer.runner_per_model=8
explorer.max_timeout=3600
explorer.rollout_model.enable_history=true
explorer.rollout_model.engine_num=2
explorer.rollout_model.tensor_parallel_size=2
explorer.rollout_model.enable_prefix_caching=false
explorer.rollout_model.enforce_eager=true
explorer.rollout_model.gpu_memory_utilization=0.7
explorer.rollout_model.enable_chunked_prefill=true
explorer.env_vars.TMPDIR=${oc.env:TMPDIR,/tmp}
synchronizer.sync_style=explorer_driven
synchronizer.sync_interval=2
synchronizer.sync_timeout=3600
trainer.save_interval=50
trainer.grad_clip=1.0
trainer.use_dynamic_bsz=true
trainer.max_token_len_per_gpu=20480
trainer.ulysses_sequence_parallel_size=1
monitor.monitor_type=tensorboard
""",
    "agentscope_react": """
project=AgentScope-ReAct
name=GSM8K-Qwen3-8B
algorithm.algorithm_type=multi_step_grpo
algorithm.repeat_times=8
algorithm.optimizer.lr=1e-6
model.max_response_tokens=16384
model.max_model_len=24576
buffer.total_epochs=1
buffer.batch_size=32
buffer.train_batch_size=256
buffer.explorer_input.taskset.name=gsm8k
buffer.explorer_input.taskset.path=${oc.env:TRINITY_TASKSET_PATH,openai/gsm8k}
buffer.explorer_input.taskset.subset_name=main
buffer.explorer_input.taskset.split=train
buffer.explorer_input.taskset.format={prompt_key: question, response_key: answer}
buffer.explorer_input.taskset.rollout_args.temperature=1.0
buffer.explorer_input.taskset.default_workflow_type=as_react_workflow
buffer.explorer_input.eval_tasksets=[]
buffer.trainer_input.experience_buffer={name: agentscope_gsm8k_buffer, storage_type: queue}
explorer.eval_interval=50
explorer.runner_per_model=8
explorer.max_timeout=360
explorer.rollout_model.engine_num=4
explorer.rollout_model.tensor_parallel_size=1
explorer.rollout_model.enable_prefix_caching=false
explorer.rollout_model.enforce_eager=false
explorer.rollout_model.enable_openai_api=true
explorer.rollout_model.enable_history=true
explorer.rollout_model.enable_auto_tool_choice=true
explorer.rollout_model.tool_call_parser=hermes
explorer.rollout_model.reasoning_parser=deepseek_r1
explorer.rollout_model.enable_thinking=true
synchronizer.sync_style=dynamic_by_explorer
synchronizer.sync_interval=2
synchronizer.sync_timeout=1200
trainer.save_interval=100
trainer.grad_clip=1.0
trainer.use_dynamic_bsz=true
trainer.max_token_len_per_gpu=24576
trainer.ulysses_sequence_parallel_size=2
monitor.monitor_type=tensorboard
""",
    "agentscope_websearch": """
project=Trinity_Multi_Step
name=WebQA_Search_Example
algorithm.algorithm_type=grpo
algorithm.repeat_times=8
algorithm.advantage_fn=grpo
model.max_response_tokens=4096
model.max_model_len=20480
buffer.total_epochs=8
buffer.batch_size=16
buffer.train_batch_size=512
buffer.explorer_input.taskset.name=webqa_train
buffer.explorer_input.taskset.path=examples/agentscope_websearch/webwalker_rl_dataset
buffer.explorer_input.taskset.split=train
buffer.explorer_input.taskset.format={prompt_key: problem, response_key: answer}
buffer.explorer_input.taskset.workflow_args={max_turns: 10, search_client_type: tavily}
buffer.explorer_input.taskset.rollout_args={temperature: 1.0, max_tokens: 4096}
buffer.explorer_input.taskset.enable_progress_bar=false
buffer.explorer_input.eval_tasksets=[{name: webqa_test, storage_type: file, \
path: examples/agentscope_websearch/webwalker_rl_dataset, split: test, \
format: {prompt_key: problem, response_key: answer}, enable_progress_bar: false, \
workflow_args: {max_turns: 10}, rollout_args: {temperature: 0.6, max_tokens: 4096}}]
buffer.explorer_input.default_workflow_type=agentscope_v1_react_search_workflow
buffer.trainer_input.experience_buffer={name: experience_buffer, storage_type: queue, \
replay_buffer: {enable: true}}
explorer.eval_interval=10
explorer.max_repeat_times_per_runner=1
explorer.max_timeout=3600
explorer.rollout_model.enable_thinking=true
explorer.rollout_model.enable_history=true
explorer.rollout_model.enable_openai_api=true
explorer.rollout_model.enable_auto_tool_choice=true
explorer.rollout_model.tool_call_parser=hermes
explorer.rollout_model.engine_num=4
explorer.rollout_model.tensor_parallel_size=1
explorer.rollout_model.enable_prefix_caching=false
explorer.rollout_model.enforce_eager=true
explorer.rollout_model.gpu_memory_utilization=0.7
explorer.rollout_model.enable_chunked_prefill=true
explorer.auxiliary_models=[{model_path: \
"${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-4B-Instruct-2507}", engine_num: 1, \
tensor_parallel_size: 2, enable_thinking: false, max_prompt_tokens: 20480, \
max_response_tokens: 10240, max_model_len: 32000}]
synchronizer.sync_style=dynamic_by_explorer
synchronizer.sync_interval=5
synchronizer.sync_timeout=3600
trainer.save_interval=20
trainer.trainer_config.actor_rollout_ref={model: {use_remove_padding: true}, \
actor: {use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 16384, \
ulysses_sequence_parallel_size: 2, optim: {lr: 1e-6}}, ref: {log_prob_use_dynamic_bsz: \
"${trainer.trainer_config.actor_rollout_ref.actor.use_dynamic_bsz}"}}
""",
}

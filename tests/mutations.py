"""Breaks one line of the product at a time and says whether the tests that guard it notice.

    python -m tests.mutations                    all of them
    python -m tests.mutations gateway training   those of these rooms
    python -m tests.mutations --list             whether each line is still there

By hand or at night; no part of the suite. Each line is broken in a copy of the tree, and its tests
run until the first one fails, in a process that is forked with PyTorch imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 600  # a mutation that hangs is caught
# Not a module of ours: the copy's are imported after the fork.
PRELOADED = ("pytest", "torch", "transformers.models.qwen3.modeling_qwen3", "openai", "numpy")


@dataclass(frozen=True)
class Mutation:
    """A line of one room, what it becomes, and the test files (below `tests/`) that guard it.

    `old` is in the room once, wherever modules move inside it.
    """

    room: str
    old: str
    new: str
    tests: str

    def file(self, root: Path) -> Path:
        """The only one that has the line.

        Raises:
            LookupError: None has it, or it is there more than once.
        """
        at = root / "tuner" / self.room
        files = [at] if at.is_file() else sorted([*at.rglob("*.py"), *at.rglob("*.yaml")])
        counts = {file: file.read_text("utf-8").count(self.old) for file in files}
        if sum(counts.values()) != 1:
            raise LookupError(f"{self.room}: {sum(counts.values())} times: {self.old}")
        return next(file for file, count in counts.items() if count)


MUTATIONS = [
    Mutation(*row)
    for row in [
        # traces
        ("traces", "self.end[: last + 1] > last)", "self.end[: last + 1] >= last)",
         "traces/test_tree.py"),
        ("traces", "if not 0 <= id_ <= _LARGEST_ID:", "if not 0 <= id_ < _LARGEST_ID:",
         "traces/test_tree.py"),
        ("traces", "0 <= token < self._vocabulary:", "0 <= token <= self._vocabulary:",
         "traces/test_store.py"),
        ("traces", "if index and shared != length:", "if False:", "traces/test_store.py"),
        ("traces", 'if content and not content.endswith(b"\\n"):', "if False:",
         "traces/test_store.py"),
        ("traces", "if repeated is not None and repeated[0] >= most:",
         "if repeated is not None and repeated[0] > most:",
         "traces/test_branches.py traces/test_successors.py"),
        # config
        ("config", "when: {algorithm.policy_loss_fn_args.tau_pos: {above: algorithm",
         "when: {algorithm.policy_loss_fn_args.tau_pos: {below: algorithm",
         "config/test_algorithm.py training/test_spec.py"),
        ("config", "when: {value: {above: tuner.algorithm.success_rate_ub}}",
         "when: {value: {below: tuner.algorithm.success_rate_ub}}",
         "config/test_algorithm.py training/test_selection.py"),
        ("config", "when: {algorithm.optimizer.lr_warmup_steps_ratio: {above: 0}}",
         "when: {algorithm.optimizer.lr_warmup_steps_ratio: {above: 1}}",
         "config/test_algorithm.py training/test_spec.py config/test_load.py"),
        ("config", "fewest_trunks: {at_least: algorithm", "fewest_trunks: {above: algorithm",
         "loop/test_branching_runs.py"),
        ("config", 'if path == override.key or path.startswith(override.key + "."):',
         "if path == override.key:", "config/test_load.py"),
        # engines
        ("engines", "if isinstance(min_p, Tensor) or min_p > 0:",
         "if isinstance(min_p, Tensor) or min_p > 1:",
         "training/test_replay.py engines/test_conformance.py"),
        ("engines", "if isinstance(top_p, Tensor) or top_p < 1.0:",
         "if isinstance(top_p, Tensor) or top_p < 0.5:", "engines/test_sampling.py"),
        ("engines", "point.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)",
         "point.scatter_(-1, logits.argmin(dim=-1, keepdim=True), 0.0)",
         "engines/test_sampling.py"),
        ("engines", "least = logits.amax(dim=-1) + share.log()",
         "least = logits.amax(dim=-1) - share.log()",
         "training/test_replay.py engines/test_conformance.py"),
        ("engines", "if not self._matcher.consume_token(token_id):",
         "if self._matcher.consume_token(token_id) is None:", "engines/test_grammar.py"),
        ("engines", "if not _is_set(rows[-1], token_id):", "if False:",
         "engines/test_grammar.py"),
        ("engines", "reused = min(int(usable[source]), len(ids) - 1)",
         "reused = min(int(usable[source]), len(ids))",
         "engines/test_slot_engine.py engines/test_cascade.py"),
        ("engines", "if list(done[len(done) - len(begin) :]) == begin",
         "if list(done[len(done) - len(begin) :]) != begin",
         "training/test_replay.py engines/test_conformance.py"),
        ("engines", "and token == drafts[row][column]", "and True",
         "engines/test_speculation.py"),
        # gateway
        ("gateway", "safe = min(found)", "safe = max(found)",
         "engines/test_stop_strings.py gateway/test_streaming.py gateway/test_message_stream.py"),
        ("gateway", "if len(prompt_ids) >= limit:", "if len(prompt_ids) > limit:",
         "gateway/test_chat.py gateway/test_length_bound.py gateway/test_text.py"),
        ("gateway", "max_tokens=room if limit is None else min(limit, room),",
         "max_tokens=room if limit is None else limit,",
         "gateway/test_chat.py gateway/test_length_bound.py gateway/test_text.py"),
        ("gateway", "seed = request.seed if choice == 0 else int.from_bytes(mixed, \"big\")",
         "seed = request.seed", "gateway/test_chat.py gateway/test_text.py"),
        ("gateway", "return whole if self.end == self.completion.end else whole[:-1]",
         "return whole", "gateway/test_continuation.py gateway/test_keep_reasoning.py"),
        ("gateway", "if not text.startswith(asked, match.position):", "if False:",
         "gateway/test_continuation.py gateway/test_continuation_property.py"),
        ("gateway", "if candidate.position > best.position:",
         "if candidate.position < best.position:",
         "gateway/test_continuation.py gateway/test_continuation_property.py"),
        ("gateway", "if not low <= value <= high or (above and value == low):",
         "if not low <= value <= high:", "gateway/test_request.py golden/test_requests.py"),
        ("gateway", "if value == item and isinstance(value, bool) == isinstance(item, bool):",
         "if value == item:", "gateway/test_request.py golden/test_requests.py"),
        ("gateway", "if len(strings) > most:", "if len(strings) >= most:",
         "gateway/test_request.py golden/test_requests.py"),
        ("gateway", "if not _LOOPBACK.fullmatch(host) and", "if False and", "gateway/test_http.py"),
        ("gateway", "if size > limit:", "if size > limit + 1:", "gateway/test_http.py"),
        ("gateway", "room = room if budget is None else min(room, budget)", "room = room",
         "gateway/test_script.py gateway/test_credit.py gateway/test_relay.py"),
        # training
        ("training", "return centered_C / (std_S[set_C] + args.epsilon)",
         "return centered_C / (std_S[set_C] - args.epsilon)", "training/test_advantages.py"),
        ("training", "others_P = others_P / (count_S[sets.set_P] - 1).clamp(min=1)",
         "others_P = others_P / count_S[sets.set_P].clamp(min=1)", "training/test_advantages.py"),
        ("training", "return rewards_C - (sets.mean_S[set_C] + args.baseline_shift)",
         "return rewards_C - (sets.mean_S[set_C] - args.baseline_shift)",
         "training/test_advantages.py"),
        ("training", "dual = (advantages_T < 0) & (surrogate_T > bound_T)",
         "dual = (advantages_T > 0) & (surrogate_T > bound_T)", "training/test_losses.py"),
        ("training", "masked_fill(advantages_T > 0, args.tau_pos)",
         "masked_fill(advantages_T < 0, args.tau_pos)",
         "training/test_losses.py"),
        ("traces", "if call.sampling.temperature == 0:", "if call.sampling.temperature < 0:",
         "training/test_selection.py training/test_trainer.py training/test_grammar.py"),
        ("training", "if rate < self.success_rate[0]:", "if rate <= self.success_rate[0]:",
         "training/test_selection.py"),
        ("training", "return [not self.best_only or reward == best for _, reward in members]",
         "return [not self.best_only or reward != best for _, reward in members]",
         "training/test_selection.py training/test_algorithms.py"),
        ("training", "if step < warmup_steps:", "if step <= warmup_steps:",
         "training/test_optimizer.py training/test_trainer.py"),
        ("training", "self.step >= self.config.trainer.critic_warmup",
         "self.step > self.config.trainer.critic_warmup",
         "training/test_critic.py loop/test_ppo.py"),
        ("training", "old_T = tokens.recorded_T if loss_args.ratio_to ==",
         "old_T = tokens.recorded_T if loss_args.ratio_to !=",
         "training/test_stale.py training/test_algorithms.py"),
        # tasks
        ("tasks", "if not 0 <= place < len(self):", "if place >= len(self):",
         "tasks/test_lazy_rows.py tasks/test_dataset.py"),
        ("tasks", "if len(tasks) < batch_size:", "if len(tasks) < batch_size - 1:",
         "tasks/test_dataset.py"),
        ("tasks", "return interval > 0 and step % interval == 0",
         "return interval > 0 and step % interval == 1", "loop/test_local.py"),
        ("tasks", "np.any(weights < 0):", "np.any(weights < -9):", "tasks/test_curriculum.py"),
        # rewards
        ("rewards", "return float(said == wanted)", "return 0.0",
         "rewards/test_text.py rewards/test_judges.py"),
        ("rewards", "reward, score, truth = max(found, key=lambda one: one[0])",
         "reward, score, truth = min(found, key=lambda one: one[0])", "rewards/test_judges.py"),
        ("rewards", "if not stat.S_ISREG(os.fstat(descriptor).st_mode):", "if False:",
         "rewards/test_code_judges.py"),
        ("rewards", 'if text is None or b"<!DOCTYPE" in text or b"<!ENTITY" in text:',
         "if text is None:", "rewards/test_code_judges.py"),
        # rollouts
        ("rollouts", "elif trace.outcome not in _RETRIED or retries == self.settings.max_retries:",
         "elif trace.outcome not in _RETRIED or retries + 1 == self.settings.max_retries:",
         "rollouts/test_runner.py"),
        ("rollouts", "if not math.isfinite(self.reward):", "if False:", "rollouts/test_runner.py"),
        ("rollouts", "- started - self.session.in_flight.seconds", "- started",
         "rollouts/test_runner.py"),
        ("rollouts", "if len(chosen) < self.batch:", "if len(chosen) < self.batch - 1:",
         "rollouts/test_schedule.py loop/test_asynchronous.py"),
        ("rollouts", "if self.version < self.hold:", "if self.version <= self.hold:",
         "rollouts/test_schedule.py loop/test_asynchronous.py"),
        # runs
        ("runs", 'if row["step"] <= up_to]', 'if row["step"] < up_to]',
         "runs/test_directory.py loop/test_resume.py"),
        ("runs", "if not torch.isfinite(tensor).all():", "if False:",
         "loop/test_weight_path.py runs/test_model_folders.py test_mistakes.py"),
        ("runs", "if place < section.best:", "if place <= section.best:", "loop/test_history.py"),
        ("runs", "if gap > 0 and gap >= section.min_gap:", "if gap > 0 and gap > section.min_gap:",
         "loop/test_history.py tasks/test_recorded_traces.py"),
        ("runs", "if section.before is not None and trace.started >= unix_seconds(section.before):",
         "if section.before is not None and trace.started > unix_seconds(section.before):",
         "loop/test_history.py tasks/test_recorded_traces.py"),
        ("runs", "if total > machine.memory:", "if total > 2 * machine.memory:",
         "runs/test_placement.py"),
        ("runs", "if len(failed) > len(final) / 2:", "if len(failed) < len(final) / 2:",
         "runs/test_advice.py runs/test_notices.py loop/test_ending.py"),
        ("runs", "if len(of_task) >= k", "if len(of_task) > k", "runs/test_estimates.py"),
        # tools
        ("tools", "if len({run.path for run in runs}) < max(2, len(runs)):",
         "if len({run.path for run in runs}) < 2:", "tools/test_comparison.py"),
        ("tools", "if temperature == 0 and repeat > 1:", "if temperature == 0 and repeat > 9:",
         "tools/test_evaluation.py"),
        ("tools", "if number < probed:", "if number >= probed:", "tools/test_judge_check.py"),
        ("tools", "if not one.worse_than(best):", "if one.worse_than(best):",
         "tools/prompts/test_selection.py"),
        ("tools", "if found is not None and found[0] >= found[1]:",
         "if found is not None and found[0] > found[1]:", "tools/test_judge_check.py"),
        # serving
        ("serving", "self._left[key] = (left - 1 if left >= 1 else left, now)",
         "self._left[key] = (left, now)", "serving/test_limits.py"),
        ("serving", "return pause if time.monotonic() + pause <= self._until else None",
         "return pause", "serving/test_client.py"),
        ("serving", "if not self.live.busy(id_):", "if self.live.busy(id_):",
         "serving/test_limits.py"),
        ("serving", "if live.asked < since and not self.busy(id_):", "if live.asked < since:",
         "serving/test_limits.py"),
        ("serving", 'if found.verdict != "promote" or now <= before:', "if now <= before:",
         "serving/test_proving.py"),
        ("serving", "if whole or len(group) >= repeat or later >= batch:",
         "if whole or len(group) > repeat or later >= batch:",
         "serving/test_taking.py serving/test_versions.py"),
        # the loop and the rest
        ("environments", "or not isinstance(weight, int | float) or not weight > 0:",
         "or not isinstance(weight, int | float):", "environments/test_mixture.py"),
        ("environments", "return int(step) - (split == \"train\") if len(numbers) == 3 else 0",
         "return int(step) if len(numbers) == 3 else 0", "environments/test_trl.py"),
        ("environments", "if name not in sets", "if False", "environments/test_mixture.py"),
        ("loop.py", "if not record.recent and config.explorer.eval_on_startup and",
         "if config.explorer.eval_on_startup and", "loop/test_resume.py"),
        ("loop.py", "last = step == record.last_step", "last = False", "loop/test_local.py"),
        ("loop.py", "if evaluated or step == 1:", "if evaluated:",
         "loop/test_local.py runs/test_monitors.py runs/test_summary.py"),
        ("areal", "if not torch.isfinite(logprobs_L).all():", "if False:",
         "areal/test_tokens.py areal/test_faults.py"),
        ("areal", "if abs(given - recorded) > TOLERANCE * max(1.0, abs(recorded)):",
         "if abs(given - recorded) > 1e9:", "areal/test_tokens.py areal/test_faults.py"),
        ("areal", "if not len(dataset) or (drop_last and len(dataset) < batch_size):",
         "if not len(dataset):", "areal/test_going_on.py"),
        ("traces", "if reason is None and call.stretches:", "if True:",
         "training/test_selection.py"),
        ("config", "if level > MOST_LEVELS:", "if False:", "config/test_load.py"),
        ("config", "if isinstance(one, int | float) and abs(one) > MOST:", "if False:",
         "config/test_numbers.py"),
        ("gateway", "if len(text) > limit:", "if False:", "gateway/test_http.py"),
        ("gateway", "if not is_object(text):", "if False:", "gateway/test_request.py"),
        ("gateway", "if key in values or self._form.unclosed.search(value):", "if key in values:",
         "gateway/test_forms.py"),
        ("gateway", "begin = end + 1 if self._text[end : end + 1] == '\"' else self._quote + 1",
         "begin = end + 1", "gateway/test_forms.py"),
        ("gateway", "strings=form.holds_json,", "strings=False,", "gateway/test_forms.py"),
        ("gateway", "if inner and inner[1] == \"item\" and", "if inner and",
         "gateway/test_forms.py"),
        ("gateway", "if not self._form.by_schema:", "if True:", "gateway/test_forms.py"),
        ("gateway", "parameter if name in parameters.required else f\"{parameter}?\"",
         "f\"{parameter}?\"", "gateway/test_grammar.py gateway/test_forms.py"),
        ("gateway", "first = whole if required else", "first = whole if False else",
         "gateway/test_forms.py"),
        ("gateway", "if says.get(\"string\") == \"true\" or says.get(\"type\") == \"string\":",
         "if False:", "gateway/test_forms.py"),
        ("training",
         "return bool(nn.utils.get_total_norm([p.data for p in self._parameters]).isfinite())",
         "return True", "training/test_optimizer.py"),
        ("tasks", "error.__traceback__ = kept", "pass", "test_mistakes.py"),
        ("runs", "iter(told_apart([", "iter(list([", "runs/test_monitors.py"),
        ("loop.py", "if not _THE_RUN.acquire(blocking=False):",
         "if _THE_RUN.acquire(blocking=False) and False:", "loop/test_local.py"),
        ("encoding.py", "found = value.encode(name, DISPLAY_ERRORS).decode(name)",
         "found = value", "test_encoding.py"),
        ("trinity", "if version > self._loaded:", "if version >= self._loaded:",
         "trinity/test_endpoints.py"),
        ("trinity", 'if not settings.get("trainer.total_steps"):', "if True:",
         "trinity/test_datafiles.py trinity/test_launch.py"),
    ]
]  # fmt: skip


def copied(folder: Path) -> Path:
    """The tree, whose large folders are links."""
    for name in ("tuner", "tests", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("checkpoints"))
    for path in ROOT.iterdir():
        if not (folder / path.name).exists() and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def fails(root: Path, tests: list[str], log: Path) -> bool:
    """Whether one of the tests fails there; of what is printed the log is left."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with log.open("wb") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        os.chdir(root)
        sys.path[:] = [str(root), *(p for p in sys.path if p not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(root)
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "tuner")]:
            del sys.modules[name]
        code = 9
        try:
            import pytest

            select = "not nightly and not long"
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", select, *tests])
        finally:
            os._exit(int(code))
    until = time.monotonic() + SECONDS
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 1, 2):
                raise RuntimeError(f"pytest ended with {code}: {log.read_text()[-2000:]}")
            return code != 0
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.05)


def main(*arguments: str) -> int:
    rooms = [name for name in arguments if not name.startswith("--")]
    chosen = [one for one in MUTATIONS if not rooms or one.room in rooms]
    gone = []
    for one in chosen:
        try:
            one.file(ROOT)
        except LookupError as error:
            gone.append(one)
            print(f"GONE      {error}")
        for path in one.tests.split():
            if not (ROOT / "tests" / path).exists():
                print(f"NO TEST   {path}")
    if "--list" in arguments:
        print(f"{len(chosen) - len(gone)} of {len(chosen)} lines are there")
        return bool(gone)
    for name in PRELOADED:
        importlib.import_module(name)
    caught = survived = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = copied(Path(temporary) / "tree")
        log = Path(temporary) / "log"
        for number, one in enumerate(m for m in chosen if m not in gone):
            file = one.file(root)
            before, state = file.read_bytes(), file.stat()
            file.write_text(before.decode("utf-8").replace(one.old, one.new), "utf-8")
            os.utime(file, (0, 1_000_000 + number))  # or a compiled one passes for it
            began = time.monotonic()
            found = fails(root, [f"tests/{path}" for path in one.tests.split()], log)
            caught, survived = caught + found, survived + (not found)
            print(
                f"{'caught' if found else 'SURVIVED':9} {time.monotonic() - began:5.0f} s  "
                f"{file.relative_to(root)}: {one.old.strip()}  ->  {one.new.strip()}",
                flush=True,
            )
            file.write_bytes(before)
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    print(f"{caught} caught, {survived} survived, {len(gone)} gone")
    return bool(survived or gone)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

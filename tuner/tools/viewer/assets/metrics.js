/* Name and explanation of each cause of a branch; docs/agents.md has the fixes. */
const CAUSES = {
  resampled: ["same prompt again", "The same prompt was sampled again: n > 1, a retry, or best-of-n."],
  fork: ["second continuation", "Another call had already continued from that answer."],
  reasoning: ["reasoning removed", "An earlier answer was sent back without its reasoning, or the chat template removed it."],
  whitespace: ["whitespace changed", "An earlier answer came back stripped or reformatted."],
  tool_ids: ["tool call ids changed", "Tool calls came back with different ids, and the chat template prints them."],
  template: ["same messages, different tokens", "The messages are the same, but the chat template or the tokenizer produced different tokens."],
  tools_changed: ["different tools", "The same history was sent with different tools."],
  system_changed: ["different system prompt", "The same history was sent with a different system prompt, for example with the current time, or after a handoff."],
  compaction: ["history shortened", "A shorter history was sent, such as a summary or a window."],
  rewrite: ["history rewritten", "Earlier messages were replaced, dropped or inserted."],
  sub_agent: ["new conversation", "It started with a new system prompt or first message, as a sub-agent does."],
  other: ["unknown", "The request has no messages to compare, as with raw completions."],
};
const causeName = (cause) => CAUSES[cause]?.[0] ?? cause;

/* Title, metric, name of the vertical axis. */
const MULTIPLES = [["Calls cut off", "calls/truncated", "share of calls"], ["Unreadable tool calls", "calls/malformed_tool_calls", "tool calls"], ["Groups of equal reward", "groups/zero_variance", "share of groups"],
  ["Entropy", "train/entropy", "nats per token"], ["KL loss", "train/kl_loss", "loss"], ["Gradient norm", "train/grad_norm", "norm"], ["Loss", "train/loss", "loss"], ["Clipped tokens", "train/clip_fraction", "share of tokens"],
  ["KL to the teacher", "train/kl_teacher", "nats per token"], ["Pairs in the right order", "train/accuracy", "share of pairs"], ["Reward margin of pairs", "train/reward_margin", "reward"]];
// Main metric of a run: the first that it has, since a run may have no rollouts or rewards.
const AIMS = [["Training reward, mean", "reward/mean", "reward"], ["KL to the teacher", "train/kl_teacher", "nats per token"], ["Training loss", "train/loss", "loss"]];
const PARTS = ["generation", "agent", "judge", "training", "sync", "evaluation"].map((name) => ({ key: `time/${name}`, name }));

function renderMetrics() {
  const keys = [...new Set(state.metrics.flatMap((row) => Object.keys(row)))];
  const one = (key, name) => [{ key, name: name || key }];
  const evals = keys.filter((k) => k.startsWith("eval/") && k.endsWith("/reward")).map((key) => ({ key, name: key.slice(5, -7) }));
  const [aim, aimKey, aimAxis] = AIMS.find(([, key]) => keys.includes(key)) ?? AIMS[0];
  const rolledOut = !keys.includes("rows/trained");
  const charts = [chart(aim, one(aimKey), { axis: aimAxis })];
  if (evals.length) charts.push(chart(evals.length === 1 ? `Held-out reward (${evals[0].name})` : "Held-out reward", evals, { axis: "reward" }));
  if (rolledOut) charts.push(chart("Completion tokens per call", one("calls/completion_tokens", "tokens"), { axis: "tokens" }));
  charts.push(chart("Time per step", PARTS.filter(({ key }) => keys.includes(key)), { from: state.metrics.filter((row) => row.step > 0), stacked: true, unit: " s", axis: "seconds" }));
  if (rolledOut) charts.push(chart("Reward standard deviation per step", one("reward/std"), { axis: "reward" }));
  charts.push(chart("Tokens per second", one("tokens_per_second"), { axis: "tokens per second" }));
  $("charts").replaceChildren(...charts);
  // Roles with their own adapters have their own updates: train/<role>/loss.
  const ofRoles = (key) => keys.filter((k) => k.startsWith("train/") && k.split("/").length === 3 && k.endsWith(key.slice(5))).slice(0, COLOURS).map((k) => ({ key: k, name: k.split("/")[1] }));
  const series = (key) => keys.includes(key) ? one(key) : key.startsWith("train/") ? ofRoles(key) : [];
  $("multiples").replaceChildren(...MULTIPLES.map(([name, key, axis]) => [name, series(key), axis]).filter(([, found]) => found.length).map(([name, found, axis]) => chart(name, found, { small: true, axis })));
  if ($("others").open) $("all").replaceChildren(...keys.filter((k) => k !== "step").sort().map((key) => chart(key, one(key), { small: true })));
  const outcomes = ["completed", "workflow_error", "judge_error", "judge_timeout", "timeout", "no_calls", "invalid_reward", "cancelled", "rejected", "diverged", "worker_died"].map((name) => [name, sum(state.metrics, `rollouts/${name}`)]).filter(([, n]) => n);
  const extra = [["retried attempts", sum(state.metrics, "rollouts/retried")], ["calls that cannot be trained", sum(state.metrics, "calls/invalid")],
    ...keys.filter((k) => k.startsWith("rollouts/dropped/")).map((k) => [`dropped: ${k.slice(17)}`, sum(state.metrics, k)])].filter(([, n]) => n);
  bars($("outcomes"), [...outcomes, ...extra]);
  const sampled = sum(state.metrics, "tokens/sampled"), trained = sum(state.metrics, "tokens/trained"), replayed = sum(state.metrics, "tokens/replayed");
  const dropped = keys.filter((k) => k.startsWith("tokens/dropped/")).map((k) => [k.slice(15), sum(state.metrics, k)]).filter(([, n]) => n);
  bars($("tokens"), [["trained", trained], ...dropped.map(([name, n]) => [`dropped: ${name}`, n])]);
  const lost = sampled - trained - dropped.reduce((t, [, n]) => t + n, 0);
  $("balance").textContent = `${fmt(sampled)} sampled = ${fmt(trained)} trained + ${dropped.map(([name, n]) => `${fmt(n)} ${name}`).join(" + ") || "0 dropped"}` + (lost ? ` + ${fmt(lost)} UNACCOUNTED` : "") + (replayed ? `; ${fmt(replayed)} more were replayed in branches` : "");
  $("balance").classList.toggle("bad", lost !== 0);
}
function bar(name, share) {
  const node = el("div", { class: `bar ${["completed", "trained"].includes(name) ? "k1" : "k2"}`, "aria-hidden": "true" });
  node.style.width = `${100 * share}%`;
  return node;
}
function bars(node, entries) {
  const most = Math.max(1, ...entries.map(([, n]) => n));
  node.replaceChildren(...entries.flatMap(([name, n, choose]) => [choose ? el("button", { type: "button", title: choose.title, on: { click: choose.act } }, name) : el("span", {}, name), bar(name, n / most), el("span", { class: "num" }, fmt(n))]));
  if (!entries.length) node.replaceChildren(el("span", { class: "dim" }, "nothing yet"));
}
/* Training traces only; a report also counts traces that are not in the file. */
function renderCauses() {
  const all = state.summary.branches;
  const entries = Object.entries(all.counts).sort((a, b) => b[1] - a[1]), total = entries.reduce((t, [, n]) => t + n, 0);
  const choose = (cause) => ({ title: `${CAUSES[cause]?.[1] ?? ""} Click to list these traces.`, act: () => filterBy("cause", cause) });
  bars($("causes"), entries.map(([cause, n]) => [causeName(cause), n, choose(cause)]));
  if (!total && all.looked_at) $("causes").replaceChildren(el("span", { class: "dim" }, "none"));
  $("branched").textContent = `${fmt(total)} branches in ` + (all.looked_at < all.traces ? `${fmt(all.looked_at)} of ${fmt(all.traces)} traces` + (LIVE ? " so far" : "") : `${fmt(all.traces)} traces`);
}
function filterBy(name, value) {
  $(`f-${name}`).value = value;
  $("list").scrollTop = 0;
  refreshList();
  $("traces").scrollIntoView({ block: "nearest" });
}
/* Curves that only the traces have: roles and tools. */
function renderParts() {
  const { curves } = state.summary, keys = [...new Set(curves.flatMap((row) => Object.keys(row)))];
  const of = (prefix) => keys.filter((key) => key.startsWith(prefix)).sort().slice(0, COLOURS).map((key) => ({ key, name: key.slice(prefix.length) }));
  const charts = [["Mean reward of calls by role", of("role/"), "reward"], ["Completion tokens per call by role", of("tokens/"), "tokens"], ["Tool calls that failed", of("tool/"), "share of calls"]];
  $("parts").replaceChildren(...charts.filter(([, series]) => series.length).map(([title, series, axis]) => chart(title, series, { from: curves, small: true, axis })));
}
function renderTables() {
  const split = $("t-split").value, sums = { outcome: new Map(), tool: new Map(), role: new Map() };
  for (const row of state.summary.tables) {
    if (split && row.split !== split) continue;
    const total = sums[row.kind].get(row.name) ?? { name: row.name, n: 0, failures: 0, tokens: 0, seconds: 0, timed: 0, reward: 0, rewarded: 0 };
    for (const key of Object.keys(total)) if (key !== "name") total[key] += row[key];
    sums[row.kind].set(row.name, total);
  }
  const each = (total, count) => count ? fmt(Number((total / count).toPrecision(3))) : "–", share = (part, all) => `${fmt(part)} (${fmt(Number((100 * part / all).toPrecision(3)))} %)`;
  const rows = (kind) => [...sums[kind].values()].sort((a, b) => b.n - a.n), rollouts = rows("outcome").reduce((n, row) => n + row.n, 0);
  const outcome = (name) => el("button", { type: "button", title: "List these traces.", on: { click: () => filterBy("outcome", name) } }, name.replace("_", " "));
  const named = rows("role").some((row) => row.name);
  const found = [
    ["Rollouts by outcome", ["outcome", "rollouts", "mean tokens", "mean seconds", "mean reward"], rows("outcome").map((row) => [outcome(row.name), share(row.n, rollouts), each(row.tokens, row.n), each(row.seconds, row.timed), each(row.reward, row.rewarded)])],
    ["Tool calls", ["tool", "calls", "failed", "mean seconds", "total seconds", "mean reward"], rows("tool").map((row) => [row.name, fmt(row.n), share(row.failures, row.n), each(row.seconds, row.timed), row.timed ? fmt(Number(row.seconds.toPrecision(3))) : "–", each(row.reward, row.rewarded)])],
    ["Model calls by role", ["role", "calls", "cut off", "mean tokens", "mean seconds", "mean reward"], named ? rows("role").map((row) => [row.name || "(no role)", fmt(row.n), share(row.failures, row.n), each(row.tokens, row.n), each(row.seconds, row.timed), each(row.reward, row.rewarded)]) : []],
  ].filter(([, , lines]) => lines.length);
  refill($("tables"), ...found.map(([title, head, lines]) => el("div", { class: "card" }, el("h3", {}, title), el("div", { class: "scroll" }, table(head, lines)))));
  if (!found.length) $("tables").replaceChildren(el("span", { class: "dim" }, "no rollouts yet"));
}
function renderSummary() {
  renderFilters(); renderCauses(); renderParts(); renderTables(); renderTasks();
}
/* A server's sessions, and its decisions about new weights, latest first. */
function renderServed(served) {
  $("served").hidden = !served;
  if (!served) return;
  const state = (name) => el("button", { type: "button", title: "List these sessions.", on: { click: () => filterBy("outcome", name) } }, name);
  const sessions = table(["sessions", "count"], Object.entries(served.sessions).map(([name, n]) => [n ? state(name) : name, fmt(n)]));
  const decisions = table(["time", "decision", "version", "compared with", "reason"], served.decisions.map((one) => [new Date(one.at * 1000).toLocaleString(), one.decision, fmt(one.version), fmt(one.beside), one.why]));
  refill($("sessions"), el("div", { class: "card" }, sessions), ...(served.decisions.length ? [el("div", { class: "card" }, el("h3", {}, "Decisions about served weights"), el("div", { class: "scroll reasons" }, decisions))] : []));
}
/* A server that does not learn. */
const onlySessions = () => Boolean(state.run?.served) && !state.metrics.length && !state.summary.tables.length;
function renderHeader() {
  const run = state.run;
  if (!run) return;
  const steps = state.metrics.reduce((most, row) => Math.max(most, row.step), 0), left = run.status !== "completed";
  document.title = `${run.name} – tuner`;
  $("name").textContent = `${run.project} / ${run.name}`;
  $("status").textContent = run.status;
  $("status").className = `status ${left ? (DATA.stopped ? "stopped" : "open") : "completed"}`;
  const only = onlySessions();
  for (const id of ["metrics", "totals", "steps", "time", "by-split", "by-step", "by-cause"]) $(id).hidden = only;
  $("listed").textContent = only ? "Sessions" : run.served ? "Sessions and traces" : "Traces";
  $("name-of-rows").textContent = only ? "session" : "step-task-rollout";
  $("steps").textContent = run.total_steps ? `step ${steps} of ${run.total_steps}` : `step ${steps}`;
  $("time").textContent = duration(sum(state.metrics, "time/step") + sum(state.metrics.filter((row) => row.step === 0), "time/evaluation"));
  const ago = Date.now() / 1000 - run.updated;
  $("updated").textContent = !run.updated ? "" : LIVE && left ? `last write ${duration(Math.max(0, ago))} ago` : `last write ${new Date(run.updated * 1000).toLocaleString()}`;
  $("settings").textContent = Object.entries(run.settings).filter(([, v]) => v !== null).map(([k, v]) => `${k}: ${v}`).join("   ·   ");
  renderServed(run.served);
  const { problems } = state;
  const notes = [...(DATA.stopped ? [`The run stopped early: ${DATA.stopped}`] : []), ...problems.slice(0, 5), ...(problems.length > 5 ? [`… and ${problems.length - 5} more invalid lines`] : []), ...(state.failure ? [state.failure] : [])];
  $("notes").replaceChildren(...notes.map((text) => el("div", { class: "note bad" }, text)));
}


/* What each cause of a branch is called, and what happened; docs/agents.md has the fixes. */
const CAUSES = {
  resampled: ["same prompt again", "The same prompt was sampled again: n > 1, a retry, or best-of-n."],
  fork: ["second continuation", "Another call had already gone on from that answer."],
  reasoning: ["reasoning left out", "An earlier answer was sent back without its reasoning, or the chat template left it out."],
  whitespace: ["whitespace changed", "An earlier answer came back stripped or reformatted."],
  tool_ids: ["tool call ids changed", "Tool calls came back with other ids, and the chat template prints them."],
  template: ["other tokens, same messages", "The messages are the same, but the chat template or the tokenizer made other tokens of them."],
  tools_changed: ["other tools offered", "The same history was sent with other tools."],
  system_changed: ["other system prompt", "The same history was sent under another system prompt, such as one with a clock, or a handoff."],
  compaction: ["history shortened", "A shorter history was sent: a summary or a window."],
  rewrite: ["history rewritten", "Earlier messages were replaced, dropped or inserted."],
  sub_agent: ["new conversation", "It began with a system prompt or a first message of its own, as a sub-agent does."],
  other: ["no messages to judge by", "The request has no messages that would say why, as with raw completions."],
};
const causeName = (cause) => CAUSES[cause]?.[0] ?? cause;

const MULTIPLES = [["entropy", "train/entropy"], ["KL", "train/kl_loss"], ["gradient norm", "train/grad_norm"], ["loss", "train/loss"], ["clipped fraction", "train/clip_fraction"], ["equal-reward groups", "groups/zero_variance"], ["KL to the teacher", "train/kl_teacher"], ["pairs in the right order", "train/accuracy"], ["reward margin of pairs", "train/reward_margin"]];
// What a run is about, the first that it has: without rollouts or rewards it is something else.
const AIMS = [["Training reward, mean", "reward/mean"], ["KL to the teacher", "train/kl_teacher"], ["Training loss", "train/loss"]];

function renderMetrics() {
  const keys = [...new Set(state.metrics.flatMap((row) => Object.keys(row)))];
  const one = (key, name) => [{ key, name: name || key }];
  const evals = keys.filter((k) => k.startsWith("eval/") && k.endsWith("/reward")).map((key) => ({ key, name: key.slice(5, -7) }));
  const parts = ["generation", "agent", "judge", "training", "sync"].map((name) => ({ key: `time/${name}`, name }));
  const [aim, aimKey] = AIMS.find(([, key]) => keys.includes(key)) ?? AIMS[0];
  const rolledOut = !keys.includes("rows/trained");
  const charts = [chart(aim, one(aimKey))];
  if (evals.length) charts.push(chart(evals.length === 1 ? `Held-out reward (${evals[0].name})` : "Held-out reward", evals));
  if (rolledOut) charts.push(chart("Completion tokens per call", one("calls/completion_tokens", "tokens")));
  charts.push(chart("Time per step", parts, { stacked: true, unit: " s" }));
  if (rolledOut) charts.push(chart("Reward spread inside the step (std)", one("reward/std")));
  charts.push(chart("Tokens per second", one("tokens_per_second")));
  $("charts").replaceChildren(...charts);
  $("multiples").replaceChildren(...MULTIPLES.filter(([, key]) => keys.includes(key)).map(([name, key]) => chart(name, one(key), { small: true })));
  if ($("others").open) $("all").replaceChildren(...keys.filter((k) => k !== "step").sort().map((key) => chart(key, one(key), { small: true })));
  const outcomes = ["completed", "workflow_error", "judge_error", "judge_timeout", "timeout", "no_calls", "invalid_reward", "cancelled", "rejected", "diverged", "worker_died"].map((name) => [name, sum(state.metrics, `rollouts/${name}`)]).filter(([, n]) => n);
  const extra = [["retried attempts", sum(state.metrics, "rollouts/retried")], ["calls that cannot be trained", sum(state.metrics, "calls/invalid")],
    ...keys.filter((k) => k.startsWith("rollouts/dropped/")).map((k) => [`left out: ${k.slice(17)}`, sum(state.metrics, k)])].filter(([, n]) => n);
  bars($("outcomes"), [...outcomes, ...extra]);
  const sampled = sum(state.metrics, "tokens/sampled"), trained = sum(state.metrics, "tokens/trained"), replayed = sum(state.metrics, "tokens/replayed");
  const dropped = keys.filter((k) => k.startsWith("tokens/dropped/")).map((k) => [k.slice(15), sum(state.metrics, k)]).filter(([, n]) => n);
  bars($("tokens"), [["trained", trained], ...dropped.map(([name, n]) => [`dropped: ${name}`, n])]);
  const lost = sampled - trained - dropped.reduce((t, [, n]) => t + n, 0);
  $("balance").textContent = `${fmt(sampled)} sampled = ${fmt(trained)} trained + ${dropped.map(([name, n]) => `${fmt(n)} ${name}`).join(" + ") || "0 dropped"}` + (lost ? ` + ${fmt(lost)} UNACCOUNTED` : "") + (replayed ? `; ${fmt(replayed)} more were given back to branches` : "");
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
/* Of training traces; in a report of all of them, also those that are not in the file. */
function renderCauses() {
  const all = state.summary.branches;
  const entries = Object.entries(all.counts).sort((a, b) => b[1] - a[1]), total = entries.reduce((t, [, n]) => t + n, 0);
  const choose = (cause) => ({ title: `${CAUSES[cause]?.[1] ?? ""} Click to list these traces.`, act: () => filterBy("cause", cause) });
  bars($("causes"), entries.map(([cause, n]) => [causeName(cause), n, choose(cause)]));
  if (!total && all.looked_at) $("causes").replaceChildren(el("span", { class: "dim" }, "none did"));
  $("branched").textContent = `${fmt(total)} branches in ` + (all.looked_at < all.traces ? `${fmt(all.looked_at)} of ${fmt(all.traces)} traces` + (LIVE ? " so far" : "") : `${fmt(all.traces)} traces`);
}
function filterBy(name, value) {
  $(`f-${name}`).value = value;
  $("list").scrollTop = 0;
  refreshList();
  $("traces").scrollIntoView({ block: "nearest" });
}
/* What only the traces know: how roles and tools change. */
function renderParts() {
  const { curves } = state.summary, keys = [...new Set(curves.flatMap((row) => Object.keys(row)))];
  const of = (prefix) => keys.filter((key) => key.startsWith(prefix)).sort().slice(0, COLOURS).map((key) => ({ key, name: key.slice(prefix.length) }));
  const charts = [["Reward by role, mean of its calls", of("role/")], ["Completion tokens per call by role", of("tokens/")], ["Share of tool calls that failed", of("tool/")]];
  $("parts").replaceChildren(...charts.filter(([, series]) => series.length).map(([title, series]) => chart(title, series, { from: curves, small: true })));
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
    ["Rollouts by outcome", ["outcome", "rollouts", "tokens each", "seconds each", "mean reward"], rows("outcome").map((row) => [outcome(row.name), share(row.n, rollouts), each(row.tokens, row.n), each(row.seconds, row.timed), each(row.reward, row.rewarded)])],
    ["Calls of tools", ["tool", "calls", "failed", "seconds each", "seconds in all", "mean reward"], rows("tool").map((row) => [row.name, fmt(row.n), share(row.failures, row.n), each(row.seconds, row.timed), row.timed ? fmt(Number(row.seconds.toPrecision(3))) : "–", each(row.reward, row.rewarded)])],
    ["Calls of the model by role", ["role", "calls", "cut at the limit", "tokens each", "seconds each", "mean reward"], named ? rows("role").map((row) => [row.name || "(no role)", fmt(row.n), share(row.failures, row.n), each(row.tokens, row.n), each(row.seconds, row.timed), each(row.reward, row.rewarded)]) : []],
  ].filter(([, , lines]) => lines.length);
  $("tables").replaceChildren(...found.map(([title, head, lines]) => el("div", { class: "card" }, el("h3", {}, title), el("div", { class: "scroll" }, table(head, lines)))));
  if (!found.length) $("tables").replaceChildren(el("span", { class: "dim" }, "no rollouts yet"));
}
function renderSummary() {
  renderFilters(); renderCauses(); renderParts(); renderTables(); renderTasks();
}
/* Of a server: its sessions, and what was decided about new weights, the latest first. */
function renderServed(served) {
  $("served").hidden = !served;
  if (!served) return;
  const sessions = table(["sessions", "how many"], Object.entries(served.sessions).map(([name, n]) => [name, fmt(n)]));
  const decisions = table(["when", "decision", "version", "beside", "why"], served.decisions.map((one) => [new Date(one.at * 1000).toLocaleString(), one.decision, fmt(one.version), fmt(one.beside), one.why]));
  $("sessions").replaceChildren(el("div", { class: "card" }, sessions), ...(served.decisions.length ? [el("div", { class: "card" }, el("h3", {}, "Which weights serve, and why"), el("div", { class: "scroll reasons" }, decisions))] : []));
}
function renderHeader() {
  const run = state.run;
  if (!run) return;
  const steps = state.metrics.reduce((most, row) => Math.max(most, row.step), 0), left = run.status !== "completed";
  document.title = `${run.name} – tuner`;
  $("name").textContent = `${run.project} / ${run.name}`;
  $("status").textContent = run.status;
  $("status").className = `status ${left ? (DATA.stopped ? "stopped" : "open") : "completed"}`;
  $("steps").textContent = run.total_steps ? `step ${steps} of ${run.total_steps}` : `step ${steps}`;
  $("time").textContent = duration(sum(state.metrics, "time/step"));
  const ago = Date.now() / 1000 - run.updated;
  $("updated").textContent = !run.updated ? "" : LIVE && left ? `last write ${duration(Math.max(0, ago))} ago` : `last write ${new Date(run.updated * 1000).toLocaleString()}`;
  $("settings").textContent = Object.entries(run.settings).filter(([, v]) => v !== null).map(([k, v]) => `${k}: ${v}`).join("   ·   ");
  renderServed(run.served);
  const { problems } = state;
  const notes = [...(DATA.stopped ? [`The run stopped before its end: ${DATA.stopped}`] : []), ...problems.slice(0, 5), ...(problems.length > 5 ? [`… and ${problems.length - 5} more lines that are no trace`] : []), ...(state.failure ? [state.failure] : [])];
  $("notes").replaceChildren(...notes.map((text) => el("div", { class: "note bad" }, text)));
}


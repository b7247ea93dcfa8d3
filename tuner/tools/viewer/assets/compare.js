/* ---- one task, before and after ---- */
/* All rollouts of the open trace's task, the first and the last side by side. */
async function openTask(key, id) {
  const [file, offset] = splitKey(key);
  let groups;
  try {
    groups = LIVE ? (await get("api/task", [["file", file], ["offset", offset], ...chosenRuns().map((name) => ["with", name])])).runs
      : { "": DATA.traces.filter((row) => row.final && row.split === id.split && row.same === DATA.traces.find((one) => keyOf(one) === key).same) };
  } catch (error) { $("detail").replaceChildren(el("div", { class: "note bad" }, error.message)); return; }
  if (state.open !== key) return;
  const several = Object.keys(groups).length > 1, entries = Object.entries(groups).flatMap(([run, rows]) => rows.map((row) => ({ run, row })));
  const name = ({ run, row }) => `${several ? `${run}: ` : ""}step ${row.step}, rollout ${row.rollout}: ${row.reward === null ? row.outcome.replace("_", " ") : `reward ${fmt(row.reward)}`}`;
  const means = Object.entries(groups).map(([run, rows]) => ({ run, steps: meanBySteps(rows) })), own = means[0].steps, nodes = [];
  nodes.push(el("button", { type: "button", on: { click: () => openTrace(splitRow(key)) } }, "← this rollout"));
  nodes.push(el("h3", {}, `${id.split}: ${fmt(entries.length)} rollouts of one task`), el("pre", { class: "text" }, entries[0]?.row.asked ?? ""));
  if (own.length > 1) nodes.push(el("div", { class: "facts" }, el("span", {}, `mean reward ${fmt(own[0].reward)} in step ${own[0].step} → ${fmt(own[own.length - 1].reward)} in step ${own[own.length - 1].step}`)));
  if (means.some(({ steps }) => steps.length > 1)) nodes.push(chart("Mean reward of this task", means.map(({ run }, k) => ({ name: run || "reward", key: several ? `run${k}` : "reward" })), { from: several ? merged(means.map(({ steps }) => steps), "reward") : own, small: true, axis: "reward" }));
  if (entries.length < 2) nodes.push(el("div", { class: "note" }, `No other rollout of this task ${LIVE ? "in this run" : "in this file; `tuner view` shows all"}.`));
  const columns = [0, entries.length - 1].slice(0, Math.min(2, entries.length)).map((first, k) => {
    const select = el("select", { "aria-label": k ? "after" : "before" }, ...entries.map((entry, i) => el("option", { value: i }, name(entry)))), content = el("div", {});
    const show = async () => {
      const { run, row } = entries[select.value], body = await bodyOf(keyOf(row), run);
      content.replaceChildren(...(body.error ? [el("div", { class: "note bad" }, body.error)] : conversation(unpack(body.trace))));
    };
    select.value = first;
    select.addEventListener("input", show);
    show();
    return el("div", { class: "side" }, select, content);
  });
  $("detail").replaceChildren(...nodes, el("div", { class: "pair" }, ...columns));
}
const splitKey = (key) => [key.slice(0, key.lastIndexOf(":")), key.slice(key.lastIndexOf(":") + 1)];
const splitRow = (key) => { const [file, offset] = splitKey(key); return { file, offset }; };
function meanBySteps(rows) {
  const steps = new Map();
  for (const { step, reward } of rows) if (isNumber(reward)) steps.set(step, [...(steps.get(step) ?? []), reward]);
  return [...steps].map(([step, all]) => ({ step, reward: all.reduce((a, b) => a + b) / all.length }));
}
/* Merges rows of several runs by step, as `run0`, `run1`, ... */
function merged(runs, key) {
  const steps = new Map();
  runs.forEach((rows, k) => rows.forEach((row) => { if (isNumber(row[key])) steps.set(row.step, { ...steps.get(row.step), step: row.step, [`run${k}`]: row[key] }); }));
  return [...steps.values()].sort((a, b) => a.step - b.step);
}
function conversation(trace) {
  const nodes = [facts([["outcome", trace.outcome], ["reward", trace.reward], ["calls", trace.calls.length], ["tokens", trace.calls.reduce((n, call) => n + sampled(call), 0)], ...Object.entries(trace.metrics)])];
  if (trace.error) nodes.push(el("div", { class: "note bad" }, trace.error));
  trace.calls.forEach((call, i) => nodes.push(el("section", { class: "call" }, call.role ? el("h3", {}, call.role) : null, ...newMessages(trace.calls, i).fresh.map((m) => messageView(m)), messageView(call.response, true))));
  if (trace.response) nodes.push(fold("workflow response", el("pre", { class: "text" }, trace.response)));
  if (trace.feedback) nodes.push(fold("judge feedback", el("pre", { class: "text" }, trace.feedback)));
  return nodes;
}

/* ---- other runs ---- */
const chosenRuns = () => [...$("candidates").querySelectorAll("input:checked")].map((box) => box.value);
async function loadRuns() {
  const { runs, first } = await get("api/runs", []), shown = state.chosen || first;
  $("f-run").replaceChildren(...runs.map((name) => el("option", { value: name }, name)));
  $("f-run").value = shown;
  $("chooser").hidden = $("compare").hidden = runs.length < 2;
  $("candidates").replaceChildren(...runs.filter((name) => name !== shown).map((name) => el("label", {}, el("input", { type: "checkbox", value: name, on: { input: compareRuns } }), ` ${name}`)));
}
async function compareRuns() {
  const names = [$("f-run").value, ...chosenRuns()];
  let found;
  try { found = await get("api/compare", names.map((name) => ["with", name])); }
  catch (error) { $("compared").replaceChildren(el("div", { class: "note bad" }, error.message)); return; }
  if (String([$("f-run").value, ...chosenRuns()]) !== String(names)) return;
  if (names.length < 2) { $("compared").replaceChildren(); $("settings-differ").replaceChildren(); return; }
  const keys = new Set(found.runs.flatMap((run) => run.rows.flatMap((row) => Object.keys(row))));
  const evals = [...keys].filter((k) => k.startsWith("eval/") && k.endsWith("/reward")).map((k) => [`Held-out reward (${k.slice(5, -7)})`, k, "reward"]);
  const shown = [...AIMS, ...evals, ["Completion tokens per call", "calls/completion_tokens", "tokens"], ["Time per step", "time/step", "seconds"], ...MULTIPLES].filter(([, key], k, all) => keys.has(key) && all.findIndex(([, other]) => other === key) === k);
  const series = found.runs.map(({ name }, k) => ({ name, key: `run${k}` }));
  $("compared").replaceChildren(...shown.map(([title, key, axis]) => chart(title, series, { axis, from: merged(found.runs.map(({ rows }) => rows), key) })));
  const settings = Object.entries(found.settings);
  $("settings-differ").replaceChildren(el("h2", {}, "Different settings"), settings.length
    ? el("div", { class: "scroll settings-table" }, table(["setting", ...names], settings.map(([key, values]) => [key, ...values.map((value) => value === null ? "–" : json(value))])))
    : el("span", { class: "dim" }, "none"));
}

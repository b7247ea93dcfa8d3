/* ---- data ---- */
async function get(path, query) {
  let answer;
  try { answer = await fetch(`${path}?${new URLSearchParams(query)}`); }
  catch { throw new Error("tuner view does not answer; is it still running?"); }
  if (!answer.ok && answer.status !== 400) throw new Error(`tuner view answered ${answer.status}`);
  return answer.json();
}
async function getRows(path, rows, generation) {
  const part = await get(path, { from: rows.length, generation });
  if (part.error) throw new Error(part.error);
  return { ...part, rows: part.from === 0 ? part.rows : rows.concat(part.rows), changed: part.rows.length > 0 || part.generation !== generation };
}
async function poll() {
  try {
    const metrics = await getRows("api/metrics", state.metrics, state.metricsGeneration), first = !state.run;
    state.metrics = metrics.rows; state.metricsGeneration = metrics.generation; state.run = metrics.run;
    if (metrics.changed || first) renderMetrics();
    for (let more = true; more;) {
      const traces = await getRows("api/traces", state.traces, state.tracesGeneration);
      state.traces = traces.rows; state.tracesGeneration = traces.generation; state.problems = traces.problems; more = traces.more;
      if (traces.changed || first) { renderFilters(); filterTraces(); renderCauses(); }
      takeCauses(state.causes);
      countCauses();
    }
    if (first) openFromLink();
    state.failure = "";
  } catch (error) { state.failure = error.message; if (!state.run) $("notes").replaceChildren(el("div", { class: "note bad" }, error.message)); }
  renderHeader();
  setTimeout(poll, POLL_MS);
}
/* On its own: what branched takes longer to find than to list, and nothing waits for it. */
let counting = false;
async function countCauses() {
  if (counting) return;
  counting = true;
  try {
    for (let more = true; more;) {
      const part = await getRows("api/causes", state.causes, state.causesGeneration);
      state.causes = part.rows; state.causesGeneration = part.generation; state.causeProblems = part.problems; more = part.more;
      takeCauses(part.rows);
    }
  } catch { /* `poll` asks the same server and says what is wrong */ }
  counting = false;
}
function takeCauses(causes) {
  let changed = false;
  if (LIVE && state.causesGeneration !== state.tracesGeneration) return;
  state.traces.forEach((row, k) => { if (!row.causes && k < causes.length) { row.causes = causes[k]; changed = true; } });
  if (!changed) return;
  renderFilters(); renderCauses();
  if ($("f-cause").value) filterTraces();
}
function openFromLink() {
  const key = decodeURIComponent((location.hash.match(/^#trace=(.+)$/) || [])[1] || "");
  const position = state.shown.findIndex((row) => keyOf(row) === key);
  if (position >= 0) { openTrace(state.shown[position]); reveal(position); }
  else if (key) $("detail").replaceChildren(el("div", { class: "note" }, `The trace of this link, ${key}, is not ${LIVE ? "in this run" : "in this file; `tuner view` shows all"}.`));
}
function start() {
  for (const id of ["f-split", "f-step", "f-outcome", "f-cause", "f-min", "f-max", "f-order"]) $(id).addEventListener("input", () => { $("list").scrollTop = 0; filterTraces(); });
  $("f-clear").addEventListener("click", () => { for (const node of $("filters").querySelectorAll("select, input")) node.value = ""; filterTraces(); });
  $("list").addEventListener("scroll", renderList);
  $("list").addEventListener("keydown", listKeys);
  $("others").addEventListener("toggle", renderMetrics);
  addEventListener("resize", renderList);
  addEventListener("keydown", (event) => { if (event.key === "Escape") unpoint(); });
  addEventListener("pointerdown", (event) => { if (!event.target.closest("svg, .tokens")) unpoint(); });
  if (LIVE) { poll(); return; }
  Object.assign(state, { run: DATA.run, metrics: DATA.metrics, traces: DATA.traces, problems: DATA.problems });
  $("embedded").hidden = false;
  $("embedded").textContent = `${fmt(DATA.traces.length)} of ${fmt(DATA.total_traces)} traces are in this file` +
    (DATA.traces.length < DATA.total_traces ? ": those of the first and last steps and failures before others, up to a limit in size. `tuner view` shows all of them." : ". `tuner view` shows a run while it goes on.");
  takeCauses(DATA.causes);
  renderMetrics(); renderCauses(); renderHeader(); renderFilters(); filterTraces(); openFromLink();
}
start();

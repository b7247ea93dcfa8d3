/* ---- data ---- */
/* `query` is a list of pairs; the shown run is added. */
async function get(path, query) {
  let answer;
  const named = query.some(([name]) => name === "run") || !state.chosen ? query : [...query, ["run", state.chosen]];
  try { answer = await fetch(`${path}?${new URLSearchParams(named)}`); }
  catch { throw new Error("tuner view does not answer; is it still running?"); }
  if (!answer.ok && answer.status !== 400) throw new Error(`tuner view answered ${answer.status}`);
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
}
let shownAt = 0, shownState = "";
async function poll() {
  let more = false;
  try {
    const found = await get("api/run", [["from", state.metrics.length], ["generation", state.generation]]), first = !state.run;
    const changed = found.rows.length > 0 || found.generation !== state.generation;
    state.metrics = found.from === 0 ? found.rows : state.metrics.concat(found.rows);
    Object.assign(state, { run: found.run, generation: found.generation, complete: found.complete, counted: found.counted, problems: found.problems });
    more = found.more;
    if (changed || first) steady(renderMetrics);
    /* While traces are being read, their display is updated once a second. */
    const now = `${found.state} ${found.counted} ${found.complete}`;
    if (now !== shownState && (first || !more || Date.now() - shownAt > 1000)) {
      state.summary = await get("api/summary", []);
      steady(renderSummary);
      if (`${found.state} ${found.complete}` !== state.listed || $("f-cause").value) await refreshList();
      state.listed = `${found.state} ${found.complete}`;
      shownAt = Date.now(); shownState = now;
    }
    state.failure = "";
    if (first) { openFromLink(); loadRuns().catch((error) => { state.failure = error.message; renderHeader(); }); }
  } catch (error) { more = false; state.failure = error.message; if (!state.run) $("notes").replaceChildren(el("div", { class: "note bad" }, error.message)); }
  steady(renderHeader);
  setTimeout(poll, more ? 0 : POLL_MS);
}
const link = () => new URLSearchParams(location.hash.slice(1));
async function openFromLink() {
  const key = link().get("trace") ?? "";
  if (!key) return;
  await openTrace(splitRow(key));
  await refreshList();
  if (list.at !== null) reveal(list.at);
}
function changeFilters() {
  $("list").scrollTop = 0;
  refreshList().catch((error) => { state.failure = error.message; renderHeader(); });
}
function start() {
  for (const name of FILTERS) $(`f-${name}`).addEventListener("input", changeFilters);
  $("f-clear").addEventListener("click", () => { for (const node of $("filters").querySelectorAll("select, input")) node.value = ""; changeFilters(); });
  $("t-split").addEventListener("input", renderTables);
  $("list").addEventListener("scroll", renderList);
  $("list").addEventListener("keydown", listKeys);
  $("list").addEventListener("pointerdown", press);
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, release);
  $("back").addEventListener("click", closeTrace);
  $("others").addEventListener("toggle", renderMetrics);
  $("tasks").addEventListener("toggle", renderTasks);
  $("f-run").addEventListener("input", () => { location.hash = new URLSearchParams({ run: $("f-run").value }); location.reload(); });
  addEventListener("resize", renderList);
  addEventListener("scroll", unpoint);
  addEventListener("keydown", (event) => { if (event.key === "Escape") unpoint(); });
  addEventListener("pointerdown", (event) => { if (!event.target.closest("svg, .tokens")) unpoint(); });
  if (LIVE) { state.chosen = link().get("run") ?? ""; poll(); return; }
  Object.assign(state, { run: DATA.run, metrics: DATA.metrics, problems: DATA.problems, summary: DATA.summary, counted: DATA.traces.length });
  $("embedded").hidden = false;
  $("embedded").textContent = `${fmt(DATA.traces.length)} of ${fmt(DATA.total_traces)} traces are in this file` +
    (DATA.traces.length < DATA.total_traces ? ": first and last steps and failures first, up to a size limit. `tuner view` shows all of them." : ". `tuner view` follows a run in progress.");
  renderMetrics(); renderSummary(); renderHeader(); refreshList(); openFromLink();
}
start();

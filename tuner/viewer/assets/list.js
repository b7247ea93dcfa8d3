/* ---- the list of traces ---- */
const keyOf = (row) => `${row.file}:${row.offset}`;
function options(select, values, label, name = String) {
  const before = select.value;
  if (select.options.length === values.length + 1) return;
  select.replaceChildren(el("option", { value: "" }, label), ...values.map((v) => el("option", { value: v }, name(v))));
  select.value = values.map(String).includes(before) ? before : "";
}
function renderFilters() {
  const distinct = (name) => [...new Set(state.traces.map((row) => row[name]))];
  options($("f-split"), distinct("split").sort(), "all");
  options($("f-step"), distinct("step").sort((a, b) => a - b), "all");
  options($("f-outcome"), [...distinct("outcome").sort(), "not completed", "replaced by a retry"], "all");
  const found = new Set(state.traces.flatMap((row) => Object.keys(row.causes || {})));
  options($("f-cause"), ["any", "none", ...Object.keys(CAUSES).filter((cause) => found.has(cause))], "all", (v) => ({ any: "any branch", none: "no branch" })[v] ?? causeName(v));
}
function hasCause(row, cause) {
  if (!cause) return true;
  if (!row.causes) return false;
  return cause === "any" ? Object.keys(row.causes).length > 0 : cause === "none" ? Object.keys(row.causes).length === 0 : cause in row.causes;
}
function filterTraces() {
  const split = $("f-split").value, step = $("f-step").value, outcome = $("f-outcome").value, order = $("f-order").value, cause = $("f-cause").value;
  const min = $("f-min").value === "" ? null : Number($("f-min").value), max = $("f-max").value === "" ? null : Number($("f-max").value);
  const shown = state.traces.filter((row) => hasCause(row, cause) && (!split || row.split === split) && (!step || row.step === Number(step)) &&
    (!outcome || row.outcome === outcome || (outcome === "not completed" && row.outcome !== "completed") || (outcome === "replaced by a retry" && !row.final)) &&
    (min === null || (isNumber(row.reward) && row.reward >= min)) && (max === null || (isNumber(row.reward) && row.reward <= max)));
  const rank = (row, missing) => isNumber(row.reward) ? row.reward : missing;
  if (order === "new") shown.reverse();
  if (order === "low") shown.sort((a, b) => rank(a, 1e300) - rank(b, 1e300));
  if (order === "high") shown.sort((a, b) => rank(b, -1e300) - rank(a, -1e300));
  if (order === "long") shown.sort((a, b) => b.tokens - a.tokens);
  state.shown = shown;
  $("shown").textContent = shown.length === state.traces.length ? `${fmt(shown.length)} traces` : `${fmt(shown.length)} of ${fmt(state.traces.length)} traces`;
  const known = state.traces.filter((row) => row.causes).length;
  if (cause && known < state.traces.length) $("shown").textContent += `; branches known of ${fmt(known)} so far`;
  renderList();
}
/* Only the rows in view are in the document. */
function renderList() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5), last = Math.min(state.shown.length, first + Math.ceil(list.clientHeight / ROW) + 12);
  const filler = el("div", {});
  filler.style.height = `${state.shown.length * ROW}px`;
  const rows = [];
  for (let i = first; i < last; i++) {
    const row = state.shown[i], chosen = keyOf(row) === state.open;
    const node = el("div", { class: "row", role: "option", id: `row-${i}`, "aria-selected": String(chosen), "aria-setsize": state.shown.length, "aria-posinset": i + 1, title: row.error, on: { click: () => openTrace(row) } },
      el("span", { class: "num" }, `${row.split === "train" ? "" : row.split + " "}${row.step}-${row.task}-${row.rollout}`), el("span", { class: "num" }, fmt(row.reward)),
      el("span", { class: row.outcome === "completed" ? "dim" : "bad" }, row.outcome.replace("_", " ") + (row.final ? "" : ", retried")), el("span", { class: "num dim" }, fmt(row.tokens)));
    node.style.top = `${i * ROW}px`;
    rows.push(node);
    if (chosen) list.setAttribute("aria-activedescendant", `row-${i}`);
  }
  list.replaceChildren(filler, ...rows);
}
function listKeys(event) {
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9 };
  if (!(event.key in moves) || !state.shown.length) return;
  event.preventDefault();
  const at = state.shown.findIndex((row) => keyOf(row) === state.open);
  const next = Math.max(0, Math.min(state.shown.length - 1, (at < 0 && moves[event.key] > 0 ? -1 : at) + moves[event.key]));
  openTrace(state.shown[next]);
  reveal(next);
}
function reveal(position) {
  const list = $("list"), top = position * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  renderList();
}


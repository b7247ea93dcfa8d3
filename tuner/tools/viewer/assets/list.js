/* ---- the list of traces ---- */
/* Rows are loaded as they come into view, from the server or from this file. */
const BLOCK = 100;
const list = { query: {}, total: 0, all: 0, at: null, rows: new Map(), asked: new Set(), turn: 0 };
const keyOf = (row) => `${row.file}:${row.offset}`;
const FILTERS = ["text", "split", "step", "outcome", "cause", "begins", "low", "high", "order"];
const query = () => Object.fromEntries(FILTERS.map((name) => [name, $(`f-${name}`).value.trim()]));

function options(select, values, label, name = String) {
  const before = select.value, all = values.join("\n");
  if (select.dataset.values === all && select.options.length) return;
  select.dataset.values = all;
  select.replaceChildren(el("option", { value: "" }, label), ...values.map((v) => el("option", { value: v }, name(v))));
  select.value = values.map(String).includes(before) ? before : "";
}
function renderFilters() {
  const { splits, steps, outcomes, causes, trees } = state.summary;
  options($("f-split"), splits, "all");
  $("begins").hidden = !trees;
  options($("t-split"), splits, "all");
  options($("f-step"), steps, "all");
  options($("f-outcome"), [...outcomes, "not completed", "replaced by a retry"], "all");
  options($("f-cause"), ["any", "none", ...Object.keys(CAUSES).filter((cause) => causes.includes(cause))], "all", (v) => ({ any: "any branch", none: "no branch" })[v] ?? causeName(v));
}

/* Filters the traces in this file as tuner/tools/viewer/queries.py does for `tuner view`. */
function findHere(wanted) {
  const needle = searchable(wanted.text), low = wanted.low === "" ? -Infinity : Number(wanted.low), high = wanted.high === "" ? Infinity : Number(wanted.high);
  const hasCause = (row) => { const n = Object.keys(row.causes).length; return wanted.cause === "any" ? n > 0 : wanted.cause === "none" ? n === 0 : wanted.cause in row.causes; };
  const began = (row) => ({ start: row.within === null, inside: row.within !== null, diverged: row.diverged !== null })[wanted.begins];
  const found = DATA.traces.filter((row) => (!wanted.cause || hasCause(row)) && (!wanted.begins || began(row)) && (!wanted.split || row.split === wanted.split) && (!wanted.step || row.step === Number(wanted.step)) &&
    (!wanted.outcome || row.outcome === wanted.outcome || (wanted.outcome === "not completed" && row.outcome !== "completed") || (wanted.outcome === "replaced by a retry" && !row.final)) &&
    (wanted.low === "" || row.reward !== null) && (wanted.high === "" || row.reward !== null) && (row.reward === null || (row.reward >= low && row.reward <= high)) && (!needle || textOf(row).includes(needle)));
  const rank = (row) => row.reward ?? -Infinity, moved = (row) => row.change === null ? -1 : Math.abs(row.change);
  const orders = {
    worst: (a, b) => rank(a) - rank(b), best: (a, b) => rank(b) - rank(a), long: (a, b) => b.tokens - a.tokens,
    changed: (a, b) => moved(b) - moved(a) || a.same - b.same || a.split.localeCompare(b.split),
  };
  if (wanted.order === "new") found.reverse(); else if (wanted.order) found.sort(orders[wanted.order]);
  return found;
}
const searchable = (text) => text.toLowerCase().split(/\s+/).filter(Boolean).join(" ");
function textOf(row) {
  if (row.searched === undefined) {
    const trace = DATA.bodies[keyOf(row)].trace;
    row.searched = searchable(`${row.session ?? ""} ${row.asked} ${Object.values(trace.task).map(json).join(" ")} ${row.answered} ${trace.response}`);
  }
  return row.searched;
}
const pairs = (wanted) => Object.entries(wanted).filter(([, value]) => value !== "");
async function part(wanted, first) {
  if (LIVE) return { ...await get("api/list", [...pairs(wanted), ["first", first], ["count", BLOCK]]), at: list.at };
  const found = findHere(wanted), at = found.findIndex((row) => keyOf(row) === state.open);
  return { total: found.length, all: DATA.traces.length, first, rows: found.slice(first, first + BLOCK), at: at < 0 ? null : at };
}
/* Reload after a change of filters or traces, once for all changes in the meantime. */
let asking = false, again = false;
async function refreshList() {
  again = true;
  if (asking) return;
  asking = true;
  try {
    while (again) {
      again = false;
      let moved = 0;
      const wanted = query(), block = Math.floor($("list").scrollTop / ROW / BLOCK), found = await part(wanted, block * BLOCK);
      /* Rows that came at the top push down those that are read. */
      if (wanted.order === "new" && String(pairs(wanted)) === String(pairs(list.query)) && $("list").scrollTop > 0) moved += found.total - list.total;
      Object.assign(list, { query: wanted, rows: new Map(), asked: new Set([block]), turn: list.turn + 1 });
      take(found);
      if (moved) { $("list").scrollTop += moved * ROW; renderList(); }
      /* The open trace's position is loaded after the rows are shown, so nothing waits for it. */
      if (LIVE && state.open && !again) list.at = (await get("api/position", [...pairs(wanted), ["key", state.open]])).at;
    }
  } finally { asking = false; }
}
async function loadBlock(block) {
  if (list.asked.has(block)) return;
  list.asked.add(block);
  const turn = list.turn;
  try {
    const found = await part(list.query, block * BLOCK);
    if (turn === list.turn) take(found);
  } catch (error) { list.asked.delete(block); state.failure = error.message; renderHeader(); }
}
function take(found) {
  if (found.error) throw new Error(found.error);
  found.rows.forEach((row, k) => list.rows.set(found.first + k, row));
  Object.assign(list, { total: found.total, all: found.all, at: found.at });
  const most = several(list.all, onlySessions() ? "session" : "trace"), cause = $("f-cause").value;
  const shown = (list.total === list.all ? most : `${fmt(list.total)} of ${most}`) + (state.complete ? "" : " so far");
  steady(() => {
    $("shown").textContent = shown + (cause && state.counted < list.all ? `; branches of ${fmt(state.counted)} known so far` : "");
    renderList();
  });
  /* An open session is shown again when it has grown or was judged. */
  const open = found.rows.find((row) => keyOf(row) === state.open);
  if (open?.session && stateOf(open) !== state.seen) openTrace(open);
}
const stateOf = (row) => [row.outcome, row.reward, row.calls].join();
/* A row that is replaced between press and release gets no click, so until the release rows stay. */
let pressed = false;
function press(event) { pressed = event.button === 0 && event.target.closest(".row") !== null; }
function release() {
  if (!pressed) return;
  pressed = false;
  setTimeout(renderList);
}
/* The document contains only the rows in view. */
function renderList() {
  if (pressed) return;
  const box = $("list"), first = Math.max(0, Math.floor(box.scrollTop / ROW) - 3), last = Math.min(list.total, first + Math.ceil(box.clientHeight / ROW) + 6);
  const filler = el("div", {}), rows = [];
  filler.style.height = `${list.total * ROW}px`;
  for (let i = first; i < last; i++) {
    const row = list.rows.get(i);
    if (!row) { loadBlock(Math.floor(i / BLOCK)); continue; }
    const chosen = keyOf(row) === state.open, ended = row.outcome.replace("_", " ") + (row.final ? "" : ", retried") + (row.within === null ? "" : ` ↳ ${row.within}`);
    const change = list.query.order === "changed" && isNumber(row.change) ? `task ${row.change < 0 ? "" : "+"}${fmt(row.change)}` : "";
    const name = row.session ? row.session.slice(-8) : `${row.split === "train" ? "" : row.split + " "}${row.step}-${row.task}-${row.rollout}`;
    const node = el("div", { class: "row", role: "option", id: `row-${i}`, "aria-selected": String(chosen), "aria-setsize": list.total, "aria-posinset": i + 1, title: row.error ?? row.session, on: { click: () => openTrace(row, i) } },
      el("div", { class: "top" }, el("span", { class: "num" }, name), el("span", { class: "num" }, fmt(row.reward)),
        el("span", { class: row.outcome === "completed" || row.session ? "dim" : "bad" }, change || ended), el("span", { class: "num dim" }, fmt(row.tokens))),
      el("div", { class: "text" }, row.asked), el("div", { class: "text dim" }, row.answered || row.error ? `→ ${row.answered || row.error}` : ""));
    node.style.top = `${i * ROW}px`;
    rows.push(node);
    if (chosen) box.setAttribute("aria-activedescendant", `row-${i}`);
  }
  box.replaceChildren(filler, ...rows);
}
async function listKeys(event) {
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
  if (!(event.key in moves) || !list.total) return;
  event.preventDefault();
  const at = list.at === null && moves[event.key] > 0 ? -1 : list.at ?? 0;
  list.at = Math.max(0, Math.min(list.total - 1, at + moves[event.key]));
  const next = list.at;
  reveal(next);
  await loadBlock(Math.floor(next / BLOCK));
  if (list.rows.has(next) && list.at === next) openTrace(list.rows.get(next), next);
}
function reveal(position) {
  const box = $("list"), top = position * ROW;
  if (top < box.scrollTop) box.scrollTop = top;
  if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
  renderList();
}

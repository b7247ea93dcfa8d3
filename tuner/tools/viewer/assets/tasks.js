/* ---- training tasks, step by step ---- */
/* A click on a column header sorts by it; a second one reverses the order. */
const TASK_ORDERS = {
  task: (row) => row.asked, stratum: (row) => row.stratum, steps: (row) => row.taken, rollouts: (row) => row.n,
  mean: (row) => row.mean, change: (row) => row.change ?? -Infinity,
};
const taskOrder = { by: "mean", up: true };
let tasksSeen = null;

function sortTasks(by) {
  taskOrder.up = taskOrder.by === by ? !taskOrder.up : by === "task" || by === "stratum" || by === "mean";
  taskOrder.by = by;
  showTasks(tasksSeen);
}
/* Loaded only while visible. */
async function renderTasks() {
  /* Without a task that was drawn again there is no course to show, but a selector has its curves. */
  const again = state.summary.tasks, drawn = state.metrics.some((row) => isNumber(row["tasks/seen"]));
  $("tasks").hidden = !again && !drawn;
  $("task-table").parentNode.hidden = !again;
  if (!$("tasks").open || $("tasks").hidden) return;
  try { tasksSeen = LIVE ? await get("api/tasks", []) : DATA.tasks; steady(() => showTasks(tasksSeen)); }
  catch (error) { state.failure = error.message; renderHeader(); }
}
function showTasks({ total, field, steps, rows }) {
  const names = [...new Set(state.metrics.flatMap((row) => Object.keys(row)))].filter((key) => /^tasks\/.+\/passed$/.test(key)).sort().slice(0, COLOURS);
  const of = (key, name) => [{ key, name }], drawn = state.metrics.some((row) => isNumber(row["tasks/seen"]));
  const shares = ["seen", "always", "never"].map((name) => ({ key: `tasks/${name}`, name: { seen: "seen, of all tasks", always: "always passed, of tasks seen", never: "never passed, of tasks seen" }[name] }));
  $("strata").replaceChildren(...[
    drawn ? chart("Rollouts that passed", of("tasks/passed", "share"), { axis: "share of rollouts" }) : null,
    names.length ? chart(`Rollouts that passed, by ${field ?? "value"}`, names.map((key) => ({ key, name: key.slice(6, -7) })), { axis: "share of rollouts" }) : null,
    drawn ? chart("Tasks, by their last rollouts", shares, { axis: "share of tasks" }) : null,
  ].filter(Boolean));
  const key = TASK_ORDERS[taskOrder.by], sign = taskOrder.up ? 1 : -1;
  const order = (a, b) => { const x = key(a), y = key(b); return sign * (x < y ? -1 : x > y ? 1 : 0) || a.same - b.same; };
  const means = rows.flatMap((row) => row.cells.map(([, , mean]) => mean)), low = Math.min(0, ...means), high = Math.max(1, ...means);
  const heads = ["task", ...(field ? ["stratum"] : []), "steps", "rollouts", "mean", "change"];
  const head = (name) => el("th", { scope: "col", "aria-sort": taskOrder.by === name ? (taskOrder.up ? "ascending" : "descending") : "none" }, el("button", { type: "button", on: { click: () => sortTasks(name) } }, name === "stratum" ? field : name));
  const range = ([first, last]) => first === last ? `step ${first}` : `steps ${first} to ${last}`;
  const heat = (row) => {
    const found = new Map(row.cells.map(([column, n, mean]) => [column, { n, mean }]));
    return el("td", { class: "heat", role: "img", "aria-label": row.cells.map(([column, , mean]) => `${range(steps[column])}: ${fmt(mean)}`).join("; ") }, ...steps.map((step, column) => {
      const cell = found.get(column), node = el("i", { title: cell ? `${range(step)}: mean reward ${fmt(cell.mean)} of ${fmt(cell.n)} rollouts` : range(step) });
      if (cell) node.style.background = `color-mix(in srgb, var(--good) ${Math.round(100 * (cell.mean - low) / (high - low))}%, var(--s2))`;
      return node;
    }));
  };
  const shorter = (text) => text.length > 60 ? `${text.slice(0, 59)}…` : text;
  const name = (row) => el("button", { type: "button", title: `${row.asked}\nList the traces of this task.`, on: { click: () => filterBy("text", row.asked.split(" … ").pop().slice(0, 100)) } }, shorter(row.asked) || "(empty)");
  const cells = { task: name, stratum: (row) => row.stratum, steps: (row) => fmt(row.taken), rollouts: (row) => fmt(row.n), mean: (row) => fmt(Number(row.mean.toPrecision(3))), change: (row) => row.change === null ? "–" : `${row.change > 0 ? "+" : ""}${fmt(Number(row.change.toPrecision(3)))}` };
  $("task-table").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads.map(head), el("th", { scope: "col" }, `mean reward, ${range([steps[0][0], steps[steps.length - 1][1]])}`))),
    el("tbody", {}, ...[...rows].sort(order).map((row) => el("tr", {}, ...heads.map((one) => el("td", { class: "num" }, cells[one](row))), heat(row))))));
  $("task-note").textContent = `${fmt(rows.length)} of ${fmt(total)} tasks` + (rows.length < total ? ": those used most often, with the highest and lowest mean reward, and with the largest change." : ".") +
    ` Each square is ${steps[0][0] === steps[0][1] ? "a step" : `${steps[0][1] - steps[0][0] + 1} steps`}: from ${fmt(low)} (orange) to ${fmt(high)} (green); empty if no step used the task.`;
}

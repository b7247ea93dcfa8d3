/* ---- charts ---- */
/* Round numbers, at least `parts` steps of them, whose first and last enclose the values. */
function ticks(low, high, parts) {
  const raw = (high - low) / parts, power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].filter((k) => k * power <= raw * 1.0001).pop() * power, found = [];
  for (let k = Math.floor(low / unit + 1e-6); (k - 1) * unit < high - unit * 1e-6; k++) found.push(Number((k * unit).toPrecision(12)));
  return found;
}
function unpoint() {
  tip("");
  for (const hair of document.querySelectorAll(".hair")) hair.setAttribute("visibility", "hidden");
}
const COLOURS = 8, colour = (k) => `k${k % COLOURS + 1}`;
/* series: [{name, key}] of `from`, rows with a step; stacked draws bars of their sums. `axis` names what the vertical axis counts. */
function chart(title, series, { from = state.metrics, stacked = false, small = false, unit = "", axis = "" } = {}) {
  const rows = from.filter((row) => isNumber(row.step) && series.some((s) => isNumber(row[s.key])));
  const card = el("div", { class: "card chart" });
  const last = rows[rows.length - 1];
  const now = !last ? "no data yet" : stacked
    ? `${fmt(series.reduce((t, s) => t + (last[s.key] || 0), 0))}${unit}`
    : series.map((s) => fmt([...rows].reverse().find((r) => isNumber(r[s.key]))?.[s.key])).join(" · ") + unit;
  card.append(el("div", { class: "top" }, el("h3", {}, title), el("span", { class: "now num" }, now)));
  if (!last) return card;
  const W = small ? 250 : 460, H = small ? 100 : 180, L = 40, R = 8, T = 18, B = 18;
  const xs = rows.map((r) => r.step), x0 = xs[0], x1 = Math.max(xs[xs.length - 1], x0 + 1);
  const values = stacked ? rows.map((r) => series.reduce((t, s) => t + (r[s.key] || 0), 0)) : rows.flatMap((r) => series.map((s) => r[s.key]).filter(isNumber));
  let low = stacked ? 0 : values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (!stacked && low >= 0 && low < high * 0.6) low = 0;
  if (high === low) { high += Math.abs(high) * 0.1 || 1; if (low !== 0) low -= Math.abs(low) * 0.1; }
  const marks = ticks(low, high, small ? 1.5 : 3);
  low = marks[0]; high = marks[marks.length - 1];
  const pad = stacked ? 0.5 : 0, X = (step) => L + (W - L - R) * (step - x0 + pad) / (x1 - x0 + 2 * pad), Y = (v) => T + (H - T - B) * (1 - (v - low) / (high - low));
  const plot = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${now} at step ${last.step}, ${rows.length} steps, from ${fmt(low)} to ${fmt(high)}` });
  for (const v of marks) {
    plot.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v) }));
    plot.append(svg("text", { class: "axis", x: L - 5, y: Y(v) + 3, "text-anchor": "end" }, fmt(v)));
  }
  for (const [step, anchor] of x0 === xs[xs.length - 1] ? [[x0, "middle"]] : [[x0, "start"], [x1, "end"]])
    plot.append(svg("text", { class: "axis", x: X(step), y: H - 4, "text-anchor": anchor }, anchor === "middle" ? `step ${step}` : step));
  plot.append(svg("text", { class: "axis", x: 0, y: 9 }, axis), svg("text", { class: "axis", x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, x0 === xs[xs.length - 1] ? "" : "step"));
  if (stacked) {
    const group = Math.ceil(rows.length / 300), width = (W - L - R) / (x1 - x0 + 1) * group;
    for (let i = 0; i < rows.length; i += group) {
      const part = rows.slice(i, i + group);
      let base = 0;
      series.forEach((s, k) => {
        const value = sum(part, s.key) / part.length;
        if (value > 0) plot.append(svg("rect", { class: `dot ${colour(k)}`, x: X(part[0].step) - width / group / 2, width: Math.max(width * 0.86, 0.7), y: Y(base + value), height: Y(base) - Y(base + value) }));
        base += value;
      });
    }
  } else series.forEach((s, k) => {
    const points = rows.filter((r) => isNumber(r[s.key]));
    if (points.length > 1) plot.append(svg("path", { class: `line ${colour(k)}`, d: "M" + points.map((r) => `${X(r.step).toFixed(1)},${Y(r[s.key]).toFixed(1)}`).join("L") }));
    if (points.length <= 30) for (const r of points) plot.append(svg("circle", { class: `dot ${colour(k)}`, cx: X(r.step), cy: Y(r[s.key]), r: small ? 1.8 : 2.4 }));
  });
  const hair = svg("line", { class: "hair", y1: T, y2: H - B, visibility: "hidden" });
  plot.append(hair);
  /* Touch has no hover: a tap points until the next tap. */
  const point = (event) => {
    unpoint();
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * W;
    const row = rows.reduce((a, b) => Math.abs(X(b.step) - at) < Math.abs(X(a.step) - at) ? b : a);
    hair.setAttribute("x1", X(row.step)); hair.setAttribute("x2", X(row.step)); hair.setAttribute("visibility", "visible");
    tip([`step ${row.step}`, ...series.filter((s) => isNumber(row[s.key])).map((s) => `${s.name}: ${fmt(row[s.key])}${unit}`)].join("\n"), event.clientX, event.clientY);
  };
  for (const name of ["pointermove", "pointerdown"]) plot.addEventListener(name, point);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") unpoint(); });
  card.append(plot);
  if (series.length > 1 || stacked) card.append(el("div", { class: "legend" }, ...series.map((s, k) => el("span", {}, el("i", { class: `swatch ${colour(k)}` }), s.name))));
  return card;
}

/* ---- rollouts that start inside others ---- */
/* The rows of a tree's ends have their starting points; its forks have the mean reward there. */
const SIDE_BY_SIDE = 6;
const begins = (end, fork) => end.within === fork.rollout && end.at_call === fork.call && end.at_token === fork.token;
const several = (n, what) => `${fmt(n)} ${what}${n === 1 ? "" : "s"}`;
const place = (call, token) => token ? `inside call ${call + 1}, after ${several(token, "token")}` : `before call ${call + 1}`;
const worth = ({ mean, ends }) => ends ? `value ${fmt(mean)} of ${several(ends, "end")}` : "no end has a reward";
const ending = (end) => [end.reward === null ? "no reward" : `reward ${fmt(end.reward)}`, end.outcome === "completed" ? "" : end.outcome.replace("_", " "), end.diverged && end.outcome !== "diverged" ? "diverged" : ""].filter(Boolean).join(", ");
async function openEnd(end) {
  await openTrace(splitRow(keyOf(end)));
  $("detail").querySelector(".tree [aria-current=true]")?.focus();
}
/* A trunk is a line with its forks; a rollout that starts at a fork is a separate line next to it. */
function treeView(tree, rollout) {
  const rewards = tree.ends.map((end) => end.reward).filter(isNumber), low = Math.min(...rewards), range = Math.max(...rewards) - low;
  const meter = (value) => { const node = bar("completed", isNumber(value) && range ? (value - low) / range : 0); return el("span", { class: "meter" }, isNumber(value) ? node : null); };
  const line = (end) => {
    const current = end.rollout === rollout, forks = tree.forks.filter((fork) => fork.rollout === end.rollout);
    const head = el("button", { type: "button", tabindex: current ? 0 : -1, "aria-current": current && "true", title: end.diverged, on: { click: () => openEnd(end) } },
      el("b", { class: "num" }, `rollout ${end.rollout}`), meter(end.reward), el("span", { class: `num ${end.outcome === "completed" ? "" : "bad"}` }, ending(end)), el("span", { class: "dim said" }, end.answered || end.error || ""));
    return el("li", {}, head, forks.length ? el("ul", { class: "trunk" }, ...forks.map((fork) => el("li", {},
      el("div", { class: "at num" }, place(fork.call, fork.token), meter(fork.mean), worth(fork)), el("ul", {}, ...tree.ends.filter((one) => begins(one, fork)).map(line))))) : null);
  };
  const box = el("ul", { class: "tree", "aria-label": "rollouts with a common beginning; use the up and down arrow keys" }, ...tree.ends.filter((end) => end.rollout === tree.trunk).map(line));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const all = [...box.querySelectorAll("button")], at = all.indexOf(document.activeElement);
    all[Math.max(0, Math.min(all.length - 1, at + (event.key === "ArrowDown" ? 1 : -1)))].focus();
  });
  requestAnimationFrame(() => { const own = box.querySelector("[aria-current=true]"); if (own) box.scrollTop = own.offsetTop - box.clientHeight / 2; });
  return el("div", {}, el("h3", {}, `${fmt(tree.ends.length)} rollouts with a common beginning`), el("div", { class: "dim" }, "The value of a point is the mean reward of the rollouts that continue from it, each branch weighted equally" + (state.complete ? "." : "; some are still being read.")), box);
}
function originView(trace) {
  const { rollout, calls, token, diverged, left_at } = trace.origin, planned = `inside rollout ${rollout.rollout}, ${place(calls, token)}`;
  if (diverged === null) return el("div", { class: "note fork" }, el("b", {}, `Starts ${planned}. `), "Earlier tokens were replayed, and count for the rollout that sampled them.");
  return el("div", { class: "note bad" }, el("b", {}, "Diverged. "), `It was planned to start ${planned}, but diverged from that rollout at call ${left_at + 1}: ${diverged.replace(/^at call \d+: /, "")}`);
}
function givenView(trace, call) {
  const whole = call.replayed === call.completion_ids.length;
  return el("div", { class: "dim" }, whole ? `Replayed: rollout ${trace.origin.rollout.rollout} has this answer.` : `Replayed: the first ${several(call.replayed, "token")} of this answer; the rest was sampled.`);
}
/* The forks on a rollout's path, with the rows of rollouts that continued differently there. */
function forksOn(tree, rollout) {
  const found = [], at = (number) => tree.ends.find((end) => end.rollout === number);
  for (let end = at(rollout), below = null; end; below = end, end = at(end.within)) {
    for (const fork of tree.forks.filter((one) => one.rollout === end.rollout && (!below || one.call < below.at_call || (one.call === below.at_call && one.token <= below.at_token)))) {
      const taken = below && begins(below, fork) ? below : end;
      found.push({ fork, others: [end, ...tree.ends.filter((one) => begins(one, fork))].filter((one) => one !== taken) });
    }
  }
  return found.sort((a, b) => a.fork.token - b.fork.token);
}
function forkView(trace, { fork, others }) {
  const shown = el("div", { class: "others" }), rest = [...others];
  const more = el("button", { type: "button", on: { click: () => show() } });
  const show = () => {
    shown.append(...rest.splice(0, SIDE_BY_SIDE).map((end) => {
      const said = el("div", {}, el("span", { class: "dim" }, "…"));
      insteadView(trace, fork, end).then((nodes) => said.replaceChildren(...nodes));
      return el("div", { class: "side" }, el("button", { type: "button", on: { click: () => openEnd(end) } }, `rollout ${end.rollout}`), ` ${ending(end)}`, said);
    }));
    more.textContent = `show ${fmt(Math.min(rest.length, SIDE_BY_SIDE))} more of ${fmt(rest.length)}`;
    more.hidden = !rest.length;
  };
  const node = el("details", { class: "note fork" }, el("summary", {}, el("b", {}, `Fork ${place(fork.call, fork.token)}: ${worth(fork)}`), " · other answers"), shown, more);
  node.addEventListener("toggle", () => { if (node.open && !shown.childElementCount) show(); });
  return node;
}
/* The first completion after a fork that differs from this rollout's. */
async function insteadView(trace, fork, end) {
  const body = await bodyOf(keyOf(end));
  if (body.error) return [el("div", { class: "dim" }, body.error)];
  const calls = unpack(body.trace).calls, own = trace.calls;
  let at = fork.call;
  while (at < calls.length && at < own.length && String(calls[at].completion_ids) === String(own[at].completion_ids)) at++;
  const same = at > fork.call ? el("div", { class: "dim" }, at < calls.length ? `the same until call ${at + 1}` : "the same to the end") : null;
  const message = at < calls.length ? messageView(calls[at].response, true) : same ? null : el("div", { class: "dim" }, "no call");
  return [same, message].filter(Boolean);
}

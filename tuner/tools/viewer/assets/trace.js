/* ---- one trace ---- */
async function openTrace(row, position = null) {
  const key = keyOf(row);
  state.open = key;
  if (row.session) state.seen = stateOf(row);
  if (position !== null) list.at = position;
  history.replaceState(null, "", `#${new URLSearchParams({ ...(state.chosen && { run: state.chosen }), trace: key })}`);
  document.querySelector(".browser").classList.add("reading");
  if (matchMedia("(max-width: 900px)").matches) document.querySelector(".pane").scrollIntoView();
  renderList();
  const body = await bodyOf(key);
  if (state.open !== key) return;
  $("detail").replaceChildren(...(body.error ? [el("div", { class: "note bad" }, body.error)] : traceView(body, key)));
}
/* A trace with the text of its tokens, or an error. */
async function bodyOf(key, run = "") {
  if (!LIVE) return key in DATA.bodies ? { ...DATA.bodies[key], vocabulary: DATA.vocabulary, tree: DATA.trees[DATA.bodies[key].tree] } : { error: `This file does not contain the trace ${key}; \`tuner view\` shows all traces.` };
  const [file, offset] = splitKey(key);
  try { return await get("api/trace", [["file", file], ["offset", offset], ...(run ? [["run", run]] : [])]); }
  catch (error) { return { error: error.message }; }
}
function closeTrace() {
  document.querySelector(".browser").classList.remove("reading");
  renderList();
  if (list.at !== null) reveal(list.at);
}
function facts(entries) {
  return el("div", { class: "facts" }, ...entries.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([name, value]) => el("span", {}, el("span", { class: "dim" }, name + " "), el("b", { class: "num" }, typeof value === "object" ? JSON.stringify(value) : fmt(value)))));
}
const SHORTEST = 0.001; /* seconds that are worth a word */
const json = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2);
const fold = (title, ...content) => el("details", {}, el("summary", {}, title), ...content);
function traceView(body, key) {
  const trace = unpack(body.trace), id = trace.id, nodes = [];
  const { session } = body, spent = Object.entries(trace.seconds).filter(([, s]) => s >= SHORTEST).map(([name, s]) => [name, isNumber(s) ? `${fmt(s)} s` : s]);
  nodes.push(el("h3", {}, session ? `Session ${session.id}` : `${id.split}, step ${id.step}, task ${id.task}, rollout ${id.rollout}`));
  nodes.push(facts(session
    ? [["state", session.state], ["reward", trace.reward], ["calls", trace.calls.length], ["application", session.application], ["group", session.group], ["tags", session.tags.join(", ")],
      ...["opened", "ended"].map((name) => [name, session[name] && new Date(session[name] * 1000).toLocaleString()]), ...spent, ...Object.entries(session.metadata)]
    : [["outcome", trace.outcome], ["reward", trace.reward], ["attempt", trace.attempt], ["calls", trace.calls.length], ...spent, ...Object.entries(trace.metrics)]));
  if (trace.error) nodes.push(el("div", { class: "note bad" }, trace.error));
  if (!trace.final) nodes.push(el("div", { class: "note" }, "A retry replaced this attempt: its tokens are never trained."));
  if (trace.origin) nodes.push(originView(trace));
  if (body.tree) nodes.push(treeView(body.tree, id.rollout));
  if (body.no_text && trace.calls.length) nodes.push(el("div", { class: "note" }, body.no_text));
  if (!session) nodes.push(el("button", { type: "button", on: { click: () => openTask(key, id) } }, "compare rollouts of this task side by side"));
  nodes.push(fold("task", el("pre", {}, json(trace.task))));
  if (trace.response && !session) nodes.push(fold("workflow response", el("pre", { class: "text" }, trace.response)));
  if (trace.feedback) nodes.push(fold(session ? "feedback" : "judge feedback", el("pre", { class: "text" }, trace.feedback)));
  trace.calls.forEach((call, i) => nodes.push(callView(trace, i, body)));
  return nodes;
}
/* The stored form shares what calls have in common; see tuner/traces/packing.py. */
function unpack(trace) {
  if (!("format" in trace)) return trace;
  const { messages, tools } = trace.distinct, ids = [], talks = [];
  const resolve = ([call, shared, fresh], earlier) => shared ? earlier[call].slice(0, shared).concat(fresh) : fresh;
  const calls = trace.calls.map((call) => {
    const prompt_ids = resolve(call.prompt_ids, ids), sent = resolve(call.messages, talks);
    ids.push(prompt_ids.concat(call.completion_ids));
    talks.push(sent.concat([call.response]));
    return { ...call, prompt_ids, messages: sent.map((k) => messages[k]), response: messages[call.response], tools: tools[call.tools] };
  });
  return { ...trace, calls };
}
function branchView(trace, branch) {
  const [name, sentence] = CAUSES[branch.cause] ?? [branch.cause, ""], prompt = trace.calls[branch.call].prompt_ids;
  let compared = "";
  if (branch.earlier !== null) {
    const old = trace.calls[branch.earlier], before = old.prompt_ids.concat(old.completion_ids), differs = prompt.findIndex((id, k) => id !== before[k]);
    compared = ` Compared with call ${branch.earlier + 1}: ${fmt(differs < 0 ? prompt.length : differs)} of the ${fmt(prompt.length)} prompt tokens are the same from the start.`;
  }
  const node = el("div", { class: "note branch" }, el("b", {}, `Branch: ${name}. `), `${sentence} This call does not continue from the end of an earlier one.${compared}`);
  node.dataset.cause = branch.cause;
  return node;
}
/* A remote model returns no ids, only how many tokens it bills. */
const sampled = (call) => call.billed ? call.billed.output_tokens : call.completion_ids.length - (call.replayed ?? 0);
const CALL_FIELDS = new Set(["role", "reward", "excluded", "masked", "undelivered", "kept_reasoning_ids", "id", "prompt_ids", "completion_ids", "logprobs", "versions", "sampling", "finish_reason", "messages", "tools", "response", "started", "seconds", "cached_tokens", "invalid", "billed", "replayed", "kept", "top_logprobs"]);
function callView(trace, index, body) {
  const call = trace.calls[index], node = el("section", { class: "call", "aria-label": `call ${index + 1}` });
  const versions = [...new Set(call.versions)], total = call.logprobs.filter(isNumber).reduce((a, b) => a + b, 0);
  node.append(el("h3", {}, `Call ${index + 1} of ${trace.calls.length}` + (call.role ? ` · ${call.role}` : "")));
  const kept = Array.isArray(call.kept_reasoning_ids) ? call.kept_reasoning_ids.length : call.kept_reasoning_ids;
  node.append(facts([["reward of the call", call.reward], ["finish", call.finish_reason], ["prompt", `${fmt(call.billed ? call.billed.input_tokens : call.prompt_ids.length)} tokens` + (call.cached_tokens ? ` (${fmt(call.cached_tokens)} reused)` : "")], ["sampled", `${fmt(sampled(call))} tokens` + (call.replayed ? ` (${fmt(call.replayed)} replayed)` : "")],
    ["mean log-prob", call.logprobs.length ? total / call.logprobs.length : null], ["weights version", versions.join(", ")], ["seconds", call.seconds >= SHORTEST ? call.seconds : null], ["reasoning kept in the prompt", kept ? `${fmt(kept)} tokens` : null],
    ...Object.entries(call.sampling).map(([name, v]) => [name, name === "seed" ? String(v) : v]),
    ...Object.entries(call).filter(([name, v]) => !CALL_FIELDS.has(name) && v !== null && v !== false)]));
  if (call.invalid) node.append(el("div", { class: "note bad" }, `Not trained: ${call.invalid}`));
  if (call.excluded) node.append(el("div", { class: "note" }, "Not trained: the workflow excluded this call."));
  if ((call.masked || []).length) node.append(el("div", { class: "note" }, `Not trained: tokens ${call.masked.map(([from, to]) => `${from} to ${to - 1}`).join(", ")} of the answer, which the workflow masked.`));
  if (call.undelivered) node.append(el("div", { class: "note bad" }, "Not trained: the agent did not receive this answer completely" + (typeof call.undelivered === "string" ? `: ${call.undelivered}` : ".")));
  const branch = body.branches.find((one) => one.call === index);
  if (branch) node.append(branchView(trace, branch));
  const { earlier, fresh } = newMessages(trace.calls, index);
  if (earlier.messages.length) node.append(fold(`${earlier.messages.length} messages as in call ${earlier.call}`, ...earlier.messages.map((m) => messageView(m))));
  else if (index && !branch) node.append(el("div", { class: "dim" }, "A new conversation: it does not start like an earlier call."));
  node.append(...fresh.map((m) => messageView(m)));
  if (call.tools.length) node.append(fold(`${several(call.tools.length, "tool")} offered: ${call.tools.map((t) => t?.function?.name ?? t?.name ?? "?").join(", ")}`, ...call.tools.map((t) => el("pre", { class: "tool-call" }, json(t)))));
  if (body.tree) node.append(...forksOn(body.tree, trace.id.rollout).filter(({ fork }) => fork.call === index).map((one) => forkView(trace, one)));
  if (call.replayed) node.append(givenView(trace, call));
  node.classList.toggle("given", call.replayed > 0 && !sampled(call));
  node.append(messageView(call.response, true), tokenView(call, body, index, Boolean(call.invalid || call.excluded || call.undelivered) || !trace.final));
  return node;
}
/* This call's messages that an earlier call had too, including that call's answer, and the new ones. */
function newMessages(calls, index) {
  const own = calls[index].messages, texts = own.map((m) => JSON.stringify(m));
  let best = 0, from = 0;
  for (let i = 0; i < index; i++) {
    const other = calls[i].messages.map((m) => JSON.stringify(m));
    if (other.length > texts.length || !other.every((text, k) => text === texts[k])) continue;
    let length = other.length;
    if (own[length] && own[length].role === "assistant" && sameAnswer(own[length], calls[i].response)) length++;
    if (length >= best) { best = length; from = i + 1; }
  }
  return { earlier: { messages: own.slice(0, best), call: from }, fresh: own.slice(best) };
}
const plain = (content) => typeof content === "string" ? content : Array.isArray(content) ? content.map((p) => typeof p === "string" ? p : p?.text ?? "").join("") : "";
const toolNames = (message) => (message.tool_calls || []).map((t) => t?.function?.name).join();
const sameAnswer = (a, b) => plain(a.content).trim() === plain(b.content).trim() && toolNames(a) === toolNames(b);
const MESSAGE_FIELDS = new Set(["role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content"]);
function messageView(message, answer = false) {
  if (message === null || typeof message !== "object") return el("div", { class: "message" }, el("pre", {}, json(message)));
  const role = String(message.role ?? "?"), known = ["user", "assistant", "tool", "system"].includes(role) ? role : "";
  const label = [answer ? "answer" : role, message.name && message.name !== role ? String(message.name) : "", message.tool_call_id ? `for ${message.tool_call_id}` : ""].filter(Boolean).join(" · ");
  const node = el("div", { class: `message ${known} ${answer ? "answer" : ""}` }, el("div", { class: "role" }, label));
  if (message.reasoning_content) node.append(fold("reasoning", el("pre", { class: "text" }, json(message.reasoning_content))));
  const parts = Array.isArray(message.content) ? message.content : [message.content];
  for (const part of parts) {
    if (part === null || part === undefined || part === "") continue;
    const url = part.type === "image_url" ? String(part.image_url?.url ?? "") : "";
    if (url.startsWith("data:image/")) { node.append(el("img", { class: "image", src: url, alt: "image" })); continue; }
    const text = typeof part === "string" ? part : part.type === "text" || part.type === "output_text" || part.type === "input_text" ? part.text : null;
    node.append(text !== null ? el("pre", { class: "text" }, String(text)) : el("pre", { class: "tool-call" }, json(part)));
  }
  for (const tool of Array.isArray(message.tool_calls) ? message.tool_calls : []) {
    let args = tool?.function?.arguments ?? tool;
    try { args = typeof args === "string" ? json(JSON.parse(args)) : json(args); } catch { /* shown unparsed */ }
    node.append(el("pre", { class: "tool-call" }, `calls ${tool?.function?.name ?? "a tool"}${tool?.id ? ` (${tool.id})` : ""}\n${args}`));
  }
  const rest = Object.entries(message).filter(([name, v]) => !MESSAGE_FIELDS.has(name) && v !== null && v !== "" && !(Array.isArray(v) && !v.length));
  if (rest.length) node.append(el("pre", { class: "tool-call" }, json(Object.fromEntries(rest))));
  if (node.childElementCount === 1) node.append(el("span", { class: "dim" }, "(empty)"));
  return node;
}

/* ---- tokens ---- */
const BUCKETS = [[0.9, "≥ 90 %"], [0.5, "50–90 %"], [0.2, "20–50 %"], [0.05, "5–20 %"], [0.01, "1–5 %"], [-1, "< 1 %"]];
const bucket = (logprob) => isNumber(logprob) ? BUCKETS.findIndex(([p]) => Math.exp(logprob) >= p) : 5;
function tokenView(call, body, index, untrained) {
  const words = body.vocabulary, characters = body.characters[index], hasText = !body.no_text, start = call.prompt_ids.length > 2 * PROMPT_TAIL ? call.prompt_ids.length - PROMPT_TAIL : 0;
  const box = el("div", { class: "tokens" + (untrained ? " untrained" : ""), tabindex: 0, role: "group", "aria-label": `tokens of call ${index + 1}; use the left and right arrow keys to read them` });
  const text = (id, special) => hasText ? special ?? words[id] ?? `[${id}]` : String(id);
  /* A line break is shown as a mark and still breaks the line. */
  const visible = (t) => t === "" ? "∅" : t.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  const token = (kind, i) => {
    const given = kind === "completion" && i < (call.replayed ?? 0), id = call[`${kind}_ids`][i];
    const node = el("span", { class: (given ? "back" : kind === "completion" ? `s p${bucket(call.logprobs[i])}` : "prompt") + (hasText ? "" : " id") }, visible(text(id, characters[kind][i])));
    node.dataset.kind = kind; node.dataset.i = i;
    return node;
  };
  const prompt = (from, to) => { const nodes = []; for (let i = from; i < to; i++) nodes.push(token("prompt", i)); return nodes; };
  if (start) box.append(el("button", { type: "button", on: { click: (event) => { event.target.replaceWith(...prompt(0, start)); box.focus(); } } }, `show ${fmt(start)} earlier prompt tokens`), " ");
  box.append(...prompt(start, call.prompt_ids.length));
  for (let i = 0; i < call.completion_ids.length; i++) box.append(token("completion", i));
  const describe = (node) => {
    const { kind, i } = node.dataset, id = call[`${kind}_ids`][i], head = `${JSON.stringify(words[id] ?? null)}  id ${id}`;
    if (kind === "prompt") return `${head}\nprompt token ${Number(i) + 1}: read, not trained`;
    const logprob = call.logprobs[i];
    return `${head}\nlog-prob ${isNumber(logprob) ? logprob.toFixed(4) : logprob}  (p ${isNumber(logprob) ? fmt(Math.exp(logprob)) : "?"})\nweights version ${call.versions[i]}\n${i < (call.replayed ?? 0) ? `token ${Number(i) + 1}: replayed, trained with the rollout that sampled it` : `sampled token ${Number(i) + 1}${untrained ? ": not trained" : ""}`}`;
  };
  for (const name of ["pointerover", "pointerdown"]) box.addEventListener(name, (event) => tip(event.target.dataset?.kind ? describe(event.target) : "", event.clientX, event.clientY));
  box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") tip(""); });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    const spans = [...box.querySelectorAll("span")], at = spans.findIndex((s) => s.classList.contains("at"));
    const firstSampled = Math.max(0, spans.findIndex((s) => s.dataset.kind === "completion"));
    const next = at < 0 ? firstSampled : Math.max(0, Math.min(spans.length - 1, at + (event.key === "ArrowRight" ? 1 : -1)));
    spans[at]?.classList.remove("at"); spans[next].classList.add("at");
    spans[next].scrollIntoView({ block: "nearest" });
    const place = spans[next].getBoundingClientRect();
    tip(describe(spans[next]), place.left, place.bottom - 12);
  });
  box.addEventListener("blur", () => { box.querySelector(".at")?.classList.remove("at"); tip(""); });
  const legend = el("div", { class: "legend" }, el("span", { class: "prompt" }, "grey: prompt, not trained"), call.replayed ? el("span", { class: "back" }, "replayed") : null, el("span", {}, untrained ? "struck through: sampled, not trained; probability:" : "sampled; probability:"), ...BUCKETS.map(([, name], k) => el("span", {}, el("i", { class: `p${k}` }), name)));
  return el("div", {}, box, legend);
}


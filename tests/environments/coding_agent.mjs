// A coding agent as people have them, in Node and without packages: tools, helpers that run at the
// same time with histories of their own, a history that is compacted when it gets long.
//
//     node coding_agent.mjs openai|anthropic [stream]        with the task in PROMPT.md

import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

const [dialect, how] = process.argv.slice(2);
const stream = how === "stream";
const LONG = 900; // letters of a history

const parameters = (...names) => ({
  type: "object",
  properties: Object.fromEntries(names.map((name) => [name, { type: "string" }])),
  required: names,
});
const TOOLS = {
  read_file: [parameters("path"), ({ path }) => readFileSync(path, "utf8")],
  write_file: [
    parameters("path", "content"),
    ({ path, content }) => (writeFileSync(path, content), "written"),
  ],
  run: [parameters("command"), ({ command }) => execFileSync("sh", ["-c", command], { encoding: "utf8" })],
  delegate: [parameters("task"), ({ task }) => work("You are a helper.", task, ["write_file"])],
};

// A turn in a form of our own: {text, calls: [{id, name, input}]}.

const openai = {
  path: "/chat/completions",
  headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  base: process.env.OPENAI_BASE_URL,
  body: (system, turns, tools) => ({
    model: process.env.OPENAI_MODEL,
    messages: [{ role: "system", content: system }, ...turns.flatMap(openai.turn)],
    ...(tools.length && {
      tools: tools.map((name) => ({ type: "function", function: { name, parameters: TOOLS[name][0] } })),
    }),
    stream,
  }),
  turn: ({ user, text, calls, results }) =>
    results
      ? results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }))
      : user !== undefined
        ? [{ role: "user", content: user }]
        : [{
            role: "assistant",
            content: text || null,
            ...(calls.length && {
              tool_calls: calls.map(({ id, name, given }) => ({
                id, type: "function", function: { name, arguments: given },
              })),
            }),
          }],
  whole: ({ choices: [{ message }] }) => ({
    text: message.content ?? "",
    calls: (message.tool_calls ?? []).map((call) => openai.call(call.id, call.function)),
  }),
  call: (id, { name, arguments: given }) => ({ id, name, given, input: JSON.parse(given) }),
  streamed(events) {
    let text = "";
    const calls = [];
    for (const { choices: [{ delta }] } of events.filter((event) => event.choices?.length)) {
      text += delta.content ?? "";
      for (const { index, id, function: part } of delta.tool_calls ?? []) {
        calls[index] ??= { id, name: "", arguments: "" };
        calls[index].name += part.name ?? "";
        calls[index].arguments += part.arguments ?? "";
      }
    }
    return { text, calls: calls.map((call) => openai.call(call.id, call)) };
  },
};

const anthropic = {
  path: "/v1/messages",
  headers: { "x-api-key": process.env.ANTHROPIC_API_KEY, "anthropic-version": "2023-06-01" },
  base: process.env.ANTHROPIC_BASE_URL,
  body: (system, turns, tools) => ({
    model: process.env.ANTHROPIC_MODEL,
    max_tokens: 500,
    system,
    messages: turns.map(anthropic.turn),
    ...(tools.length && { tools: tools.map((name) => ({ name, input_schema: TOOLS[name][0] })) }),
    stream,
  }),
  turn: ({ user, text, calls, results }) =>
    results
      ? {
          role: "user",
          content: results.map(({ id, content }) => ({ type: "tool_result", tool_use_id: id, content })),
        }
      : user !== undefined
        ? { role: "user", content: user }
        : {
            role: "assistant",
            content: [
              ...(text ? [{ type: "text", text }] : []),
              ...calls.map(({ id, name, input }) => ({ type: "tool_use", id, name, input })),
            ],
          },
  whole: ({ content }) => ({
    text: content.filter((block) => block.type === "text").map((block) => block.text).join(""),
    calls: content.filter((block) => block.type === "tool_use"),
  }),
  streamed(events) {
    const blocks = [];
    for (const { type, index, content_block, delta } of events) {
      if (type === "content_block_start") blocks[index] = { ...content_block, json: "" };
      if (delta?.type === "text_delta") blocks[index].text += delta.text;
      if (delta?.type === "input_json_delta") blocks[index].json += delta.partial_json;
    }
    for (const block of blocks) if (block.json) block.input = JSON.parse(block.json);
    return anthropic.whole({ content: blocks });
  },
};

const speaks = { openai, anthropic }[dialect];

async function ask(system, turns, tools) {
  const reply = await fetch(speaks.base + speaks.path, {
    method: "POST",
    headers: { ...speaks.headers, "content-type": "application/json" },
    body: JSON.stringify(speaks.body(system, turns, tools)),
  });
  if (!reply.ok) throw new Error(await reply.text());
  if (!stream) return speaks.whole(await reply.json());
  const lines = (await reply.text()).split("\n").filter((line) => line.startsWith("data: {"));
  return speaks.streamed(lines.map((line) => JSON.parse(line.slice(6))));
}

async function work(system, task, tools) {
  let turns = [{ user: task }];
  for (;;) {
    if (JSON.stringify(turns).length > LONG) {
      const summary = await ask(system, [...turns, { user: "Summarise what was done." }], tools);
      turns = [{ user: `${task}\nSo far: ${summary.text}` }];
    }
    const said = await ask(system, turns, tools);
    turns.push(said);
    if (!said.calls.length) return said.text;
    const results = said.calls.map(async ({ id, name, input }) => ({
      id, content: await TOOLS[name][1](input),
    }));
    turns.push({ results: await Promise.all(results) });
  }
}

console.log(await work("You are a coding agent.", readFileSync("PROMPT.md", "utf8"), Object.keys(TOOLS)));

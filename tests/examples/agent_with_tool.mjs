// An agent with a tool: reads a question, prints the answer. With "streamed" it asks for streams.

import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;
const stream = process.argv[2] === "streamed";
const integer = { type: "integer" };
const parameters = { type: "object", properties: { a: integer, b: integer }, required: ["a", "b"] };
const tools = [{ type: "function", function: { name: "add", parameters } }];

async function ask(messages) {
  const reply = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: OPENAI_MODEL, messages, tools, stream }),
  });
  if (!reply.ok) throw new Error(await reply.text());
  return stream ? whole(reply.body) : (await reply.json()).choices[0].message;
}

async function whole(body) {
  const said = { role: "assistant", content: "", tool_calls: [] };
  let text = "";
  for await (const piece of body.pipeThrough(new TextDecoderStream())) text += piece;
  for (const line of text.split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const { delta } = JSON.parse(line.slice(6)).choices[0];
    said.content += delta.content ?? "";
    for (const { index, ...call } of delta.tool_calls ?? []) {
      const begun = (said.tool_calls[index] ??= { ...call, function: { name: "", arguments: "" } });
      begun.function.name += call.function.name ?? "";
      begun.function.arguments += call.function.arguments ?? "";
    }
  }
  if (!said.tool_calls.length) delete said.tool_calls;
  return said;
}

const messages = [{ role: "user", content: readFileSync(0, "utf8") }];
for (;;) {
  const said = await ask(messages);
  messages.push(said);
  if (!said.tool_calls?.length) {
    console.log(said.content);
    break;
  }
  for (const { id, function: called } of said.tool_calls) {
    const { a, b } = JSON.parse(called.arguments);
    messages.push({ role: "tool", tool_call_id: id, content: String(a + b) });
  }
}

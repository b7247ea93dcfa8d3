// Reads a question, asks the model and prints its answer. Node 18 or later, no packages.

import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;

async function ask(messages) {
  const reply = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: OPENAI_MODEL, messages }),
  });
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error.message);
  return body.choices[0].message;
}

const answer = await ask([
  { role: "system", content: "You are a helpful math problem solving agent." },
  { role: "user", content: readFileSync(0, "utf8") },
]);
console.log(answer.content ?? "");

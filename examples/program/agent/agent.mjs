// Reads the problem in PROMPT.md, asks the model and writes answer.txt. Node 18 or later, no packages.

import { readFileSync, writeFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;

async function ask(messages) {
  const reply = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: OPENAI_MODEL, messages }),
  });
  if (!reply.ok) throw new Error(await reply.text());
  return (await reply.json()).choices[0].message.content ?? "";
}

const answer = await ask([
  { role: "system", content: readFileSync("SYSTEM.md", "utf8").trim() },
  { role: "user", content: readFileSync("PROMPT.md", "utf8") },
]);
writeFileSync("answer.txt", answer);
console.log(answer);

// An agent in production: a session, a call with the session's key, and its reward. No packages.
// Node 22.18 or later runs it as it stands: node agent.mts

interface Session {
  id: string;
  key: string;
  base_url: string;
}

interface Completion {
  choices: { message: { content: string | null } }[];
}

const url = process.env.TUNER_URL ?? "http://127.0.0.1:8700";
const adminKey = process.env.TUNER_ADMIN_KEY ?? "";
const task = { question: "Tom has 5 pens. He buys 3 more pens. How many pens does Tom have now?" };

async function post<Answer>(address: string, key: string, body: unknown): Promise<Answer> {
  const reply = await fetch(address, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error.message);
  return answer;
}

const session = await post<Session>(`${url}/tuner/v1/sessions`, adminKey, {
  task,
  tags: ["example"],
  sampling: { temperature: 0 },
});
const completion = await post<Completion>(`${session.base_url}/chat/completions`, session.key, {
  model: "tiny_math",
  messages: [
    { role: "system", content: "You are a helpful math problem solving agent." },
    { role: "user", content: task.question },
  ],
});
const answer = completion.choices[0]?.message.content ?? "";

const reward = (answer.split("####").at(-1) ?? "").includes("8") ? 1 : 0;
// The session's own key may judge and end it, too.
const about = `${url}/tuner/v1/sessions/${session.id}`;
await post(`${about}/reward`, session.key, { reward, feedback: "compared with the known answer" });
await post(`${about}/end`, session.key, {});
console.log(session.id, reward);

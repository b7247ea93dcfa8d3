#!/bin/sh
# Reads a question, asks the model and prints its answer. Needs curl and jq.
set -eu

reply=$(
    jq --raw-input --slurp '{
        model: env.OPENAI_MODEL,
        messages: [
            {role: "system", content: "You are a helpful math problem solving agent."},
            {role: "user", content: .}
        ]
    }' | curl --silent --show-error --noproxy '*' --data-binary @- \
        --header "Authorization: Bearer $OPENAI_API_KEY" \
        --header "Content-Type: application/json" \
        "$OPENAI_BASE_URL/chat/completions"
)
printf '%s' "$reply" | jq --raw-output '
    if .error then error(.error.message) else .choices[0].message.content // "" end'

#!/bin/sh
# An agent in production: a session, a call with the session's key, and its reward. Needs curl and jq.
set -eu

url=${TUNER_URL:-http://127.0.0.1:8700}

post() { # path, key, body
    curl --silent --show-error --noproxy '*' --fail-with-body --data-binary "$3" \
        --header "Authorization: Bearer $2" --header 'Content-Type: application/json' "$1"
}

session=$(post "$url/tuner/v1/sessions" "$TUNER_ADMIN_KEY" '{
    "task": {"question": "Tom has 5 pens. He buys 3 more pens. How many pens does Tom have now?"},
    "tags": ["example"],
    "sampling": {"temperature": 0}
}')
id=$(printf '%s' "$session" | jq --raw-output .id)
key=$(printf '%s' "$session" | jq --raw-output .key)
base_url=$(printf '%s' "$session" | jq --raw-output .base_url)

answer=$(post "$base_url/chat/completions" "$key" '{
    "model": "tiny_math",
    "messages": [
        {"role": "system", "content": "You are a helpful math problem solving agent."},
        {"role": "user", "content": "Tom has 5 pens. He buys 3 more pens. How many pens does Tom have now?"}
    ]
}' | jq --raw-output '.choices[0].message.content')

case "${answer##*####}" in *8*) reward=1 ;; *) reward=0 ;; esac
# The session's own key may judge and end it, too.
post "$url/tuner/v1/sessions/$id/reward" "$key" \
    "{\"reward\": $reward, \"feedback\": \"compared with the known answer\"}" >/dev/null
post "$url/tuner/v1/sessions/$id/end" "$key" '{}' >/dev/null
echo "$id $reward"

#!/bin/bash
if [ "$(tr -d '[:space:]' <answer.txt)" = Pelican ]; then
    echo '{"reward": 1, "answered": 1}' >/logs/verifier/reward.json
else
    echo "answer.txt does not name the oldest ship"
    echo "{\"reward\": 0, \"answered\": $([ -s answer.txt ] && echo 1 || echo 0)}" >/logs/verifier/reward.json
fi

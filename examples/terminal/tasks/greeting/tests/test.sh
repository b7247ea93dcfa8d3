#!/bin/bash
if [ "$(tr -d '[:space:]' <greeting.txt)" = hello ]; then
    echo 1 >/logs/verifier/reward.txt
else
    echo "greeting.txt does not hold the word hello"
    echo 0 >/logs/verifier/reward.txt
fi

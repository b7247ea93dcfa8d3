#!/bin/bash
# Each passed test is worth its share.
passed=0
check() { # <text of the file> <sum>
    printf "$1" >/tmp/numbers
    found=$(python3 total.py /tmp/numbers)
    if [ "$found" = "$2" ]; then passed=$((passed + 1)); else echo "of $1: $found, not $2"; fi
}
check "1\n2\n3\n" 6
check "5\n-7\n" -2
check "1\n\n2\n" 3
check "" 0
python3 -c "print($passed / 4)" >/logs/verifier/reward.txt

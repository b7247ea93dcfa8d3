#!/bin/bash
oldest=$(grep -H built ships/* | sort -k2 -n | head -1 | cut -d: -f1)
sed -n 's/^name: //p' "$oldest" >answer.txt
